"""The explanation of a request: who chose what, rounds as a server runs them, and a page that stands alone."""

from __future__ import annotations

import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tiny_models import TinyLlama, write_eagle, write_llama

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.search import score
from dustin_sglang.calibrate.texts import Passage
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.calibrate.windows import collect
from dustin_sglang.explain.__main__ import main
from dustin_sglang.explain.checks import CHOOSING
from dustin_sglang.explain.heat import heat
from dustin_sglang.explain.page import Subject, render, source_names
from dustin_sglang.explain.prompt import PART_OF_CHARACTER, pieces
from dustin_sglang.explain.rounds import Decoded, Request, Round
from dustin_sglang.explain.sources import sources
from dustin_sglang.explain.stability import with_first, with_previous
from dustin_sglang.profile import auto_profile
from dustin_sglang.selection.policies import POLICIES, Budget

SIZE = ListSize(budget=24, sinks=2, window=6)


class Elements(HTMLParser):
    """Collects elements, checks that they nest, and keeps the text inside each id."""

    VOID = {"meta", "input", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(self.seen[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, attributes in self.open:
            if name := attributes.get("id"):
                self.text[name] = self.text.get(name, "") + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``target`` and ``draft``, which often agree, and a prompt of 100 tokens."""
    root = tmp_path_factory.mktemp("explain")
    write_llama(root / "target", TinyLlama(bigram=2.0))
    write_llama(
        root / "draft", TinyLlama(48, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, seed=4, bigram=2.0)
    )
    draw = random.Random(0)
    (root / "prompt.txt").write_text(" ".join(f"w{draw.randrange(3, 256)}" for _ in range(100)))
    return root


def run(folder: Path, out: str, *more: str) -> int:
    paths = {"target": "target", "draft": "draft", "prompt": "prompt.txt", "out": out}
    sizes = ["--budget", "24", "--sinks", "2", "--window", "6", "--new-tokens", "10", "--device", "cpu"]
    return main([*(part for flag, name in paths.items() for part in (f"--{flag}", str(folder / name))), *sizes, *more])


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    assert run(folder, "page.html") == 0
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(folder: Path) -> list[TracedModel]:
    return [TracedModel(folder / role, "cpu", torch.float32) for role in ("target", "draft")]


def decode(models: list[TracedModel], policy: str = "hybrid", seed: int = 0) -> Decoded:
    target, draft = models
    prompt = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
    request = Request(target, draft, auto_profile(draft.shape, target.shape), policy, SIZE, 4, capacity=100)
    return request.decode(prompt, 14, None, lambda done: None)


def subject(texts: list[str], marks: str) -> Subject:
    one = Round(len(texts) - 2, [0, 0, 0, 0, 0], 1, marks, torch.ones(len(marks)), None, 0.5)
    verified = [["a", "b", "c", "d", "e"]]
    return Subject(Decoded([0] * len(texts), 3, [one]), texts, verified, Budget(6, 1, 1, 2), {"target": "<t>"})


def test_sources_of_a_case_by_hand() -> None:
    budget = Budget(total=6, sinks=1, window=1, lookahead=2)
    #                        0    1    2    3    4    5    6    7
    lookahead = torch.tensor([9.0, 0.0, 5.0, 0.0, 4.0, 1.0, 0.0, 9.0])
    history = torch.tensor([9.0, 7.0, 0.0, 1.0, 8.0, 0.0, 2.0, 9.0])
    positions = POLICIES["hybrid"]().select(
        budget, lookahead[None], history[None], type("Context", (), {"seq_lens": torch.tensor([8])})
    )
    # Lookahead takes 2 and 4, of which history alone (4 and 1) would have taken 4; history then fills with 1 and 6.
    assert sources(budget, positions[0], lookahead, history, 8) == "prl.b.rp"


@pytest.mark.parametrize("policy", CHOOSING)
def test_every_list_has_the_budget_and_names_only_sources_of_its_policy(models: list[TracedModel], policy: str) -> None:
    names = source_names(POLICIES[policy]().budget(SIZE.budget, SIZE.sinks, SIZE.window, 0.5))
    for one in decode(models, policy).rounds:
        assert len(one.marks) == one.length
        assert len(one.marks) - one.marks.count(".") == SIZE.budget
        assert set(one.marks) <= {*names, "."}
        assert 0 <= one.captured_mass <= 1 + 1e-6


def test_the_answer_is_the_targets_own_and_lists_do_not_change_it(models: list[TracedModel]) -> None:
    decoded = decode(models)
    ids, accepted = decoded.ids, [one.accepted for one in decoded.rounds]
    logits = models[0].read(ids, lambda layer: None, list(range(decoded.prompt_tokens - 1, len(ids) - 1)))
    assert ids[decoded.prompt_tokens :] == logits.argmax(-1).tolist()
    assert 0 < sum(accepted) < 3 * len(accepted), "some drafts are right and some wrong"
    assert len(ids) - decoded.prompt_tokens == 1 + sum(accepted) + len(accepted)
    assert decode(models, "random").ids == ids


def test_scores_are_those_that_calibration_measures(models: list[TracedModel]) -> None:
    target, draft = models
    profile = auto_profile(draft.shape, target.shape)
    decoded = decode(models)
    # Calibration's windows take all drafts as right.
    rights = [one for one in decoded.rounds if one.accepted == 3]
    assert rights
    for one in rights:
        passage = Passage([*decoded.ids[: one.length], *one.tokens], [one.length], None)
        (window,), _ = collect(target, draft, passage, 4, SIZE, extra_step=True)
        ahead = score(window.lookahead, profile.lookahead) / (4 * profile.lookahead.count)
        back = score(window.history, profile.history) / profile.history.count
        torch.testing.assert_close(one.lookahead, ahead.float(), atol=1e-4, rtol=5e-3)
        torch.testing.assert_close(one.history, back.float(), atol=1e-3, rtol=5e-3)


def test_each_group_of_layers_has_a_page_of_its_own(folder: Path) -> None:
    """The one list's history layer is 2 of 4, so the second group's list is that of no groups; the first differs."""
    lists = {}
    for name, *options in (["one"], ["1", "--layer-groups", "2"], ["2", "--layer-groups", "2", "--group", "2"]):
        assert run(folder, f"group-{name}.html", *options) == 0
        elements = Elements((folder / f"group-{name}.html").read_text(encoding="utf-8"))
        lists[name] = [one["list"] for one in json.loads(elements.text["data"])["rounds"]]
    assert lists["2"] == lists["one"] != lists["1"]
    page = (folder / "group-1.html").read_text(encoding="utf-8")
    assert "layers 0 to 1, group 1 of 2" in page


def test_decoding_stops_at_the_end_token(models: list[TracedModel]) -> None:
    target, draft = models
    decoded = decode(models)
    end = decoded.ids[decoded.prompt_tokens + 5]
    request = Request(target, draft, auto_profile(draft.shape, target.shape), "hybrid", SIZE, 4, capacity=100)
    stopped = request.decode(decoded.ids[: decoded.prompt_tokens], 14, end, lambda done: None)
    assert stopped.ids == decoded.ids[: decoded.ids.index(end, decoded.prompt_tokens) + 1]


def test_overlap_counts_chosen_positions_only() -> None:
    lists = ["pl.r.p", "pl..rrp", "p.ll.r.p", "p......p"]
    assert with_previous(lists) == [None, 2 / 3, 1 / 3, None]
    assert with_first(lists) == [None, 2 / 3, 2 / 3, None]


def test_heat_doubles_from_step_to_step() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 1.0, 0.0, 0.0])  # mean 2
    assert heat(scores) == "00123000"
    assert heat(torch.zeros(3)) == "000"
    assert heat(torch.eye(4096)[0]) == "9" + "0" * 4095


def test_the_first_round_shades_every_listed_position_exactly_once(page: str) -> None:
    elements = Elements(page)
    data = json.loads(elements.text["data"])
    first = data["rounds"][0]
    shaded: list[str] = []
    for tag, attributes in elements.seen:
        if tag == "span" and (place := re.fullmatch(r"(\d+) to (\d+)", attributes.get("title") or "")):
            shaded += [f"{p}{attributes['class']}" for p in range(int(place[1]), int(place[2]) + 1)]
    assert shaded == [f"{p}{mark}" for p, mark in enumerate(first["list"]) if mark != "."]
    assert len(shaded) == 24
    assert elements.text["text"] == "".join(data["pieces"][: first["n"]])
    counts = {mark: int(elements.text[f"count-{mark}"]) for mark in data["names"]}
    assert counts == {mark: first["list"].count(mark) for mark in data["names"]}
    assert sum(counts.values()) == int(elements.text["listed"]) == 24


def test_the_page_stands_alone_and_names_its_language(page: str) -> None:
    elements = Elements(page)
    assert "http:" not in page and "https:" not in page and "url(" not in page and "import" not in page
    assert not [tag for tag, attributes in elements.seen if {"src", "href"} & attributes.keys()]
    assert ("html", {"lang": "en"}) in elements.seen
    assert re.search("<title>[^<]+</title>", page)
    names = [attributes["id"] for _, attributes in elements.seen if "id" in attributes]
    assert len(names) == len(set(names))
    used = set(re.findall(r'\$\("([a-z]+)"\)', page))
    assert used and used <= set(names), "the script finds what it draws over"


def test_text_is_never_markup() -> None:
    evil = "</script><script>alert(1)</script><!--"
    texts = [evil, "&amp;", "<b>", '"', "'", "\n", evil, "x", evil, "y"]
    elements = Elements(render(subject(texts, "p.lb.r.p")))
    assert [tag for tag, _ in elements.seen].count("script") == 2
    assert "b" not in [tag for tag, _ in elements.seen]
    assert elements.text["text"] == "".join(texts[:8]).replace("\n", "\u21b5\n")
    assert elements.text["answer"] == "".join(texts[3:9]).replace("\n", "\u21b5\n")
    assert json.loads(elements.text["data"])["pieces"][0] == evil


def test_characters_of_several_tokens_are_shown_once() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: bool) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "a\u00e9 \u20ac!"
    shown = pieces(Bytes(), list(text.encode()))
    assert "".join(shown).replace(PART_OF_CHARACTER, "") == text
    assert shown == ["a", "\u00b7", "\u00e9", " ", "\u00b7", "\u00b7", "\u20ac", "!"]


def test_standard_input_and_a_question_make_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO((folder / "prompt.txt").read_text()))
    assert run(folder, "asked.html", "--prompt", "-", "--question", "w7 w8 w9") == 0
    asked = json.loads(Elements((folder / "asked.html").read_text()).text["data"])
    plain = json.loads(Elements(page).text["data"])
    assert asked["prompt"] == plain["prompt"] + 3
    assert "".join(asked["pieces"][: asked["prompt"]]).split()[-3:] == ["w7", "w8", "w9"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "/no/such.txt"], "--prompt /no/such.txt is not a file"),
        (["--budget", "8"], "--budget is 8; it must be above --sinks plus --window, 8"),
        (["--budget", "100"], "--budget is 100; it must be below the prompt's 100 tokens"),
        (["--sinks", "-1"], "--sinks is -1; it must be at least 0"),
        (["--window", "-1"], "--window is -1; it must be at least 0"),
        (["--policy", "dense"], "--policy is dense; it must be one of history, hybrid"),
        (["--layer-groups", "5"], "--layer-groups is 5; it must be from 1 to 4, the target's layers"),
        (["--layer-groups", "2", "--policy", "streaming"], "--layer-groups is 2 with --policy streaming"),
        (["--layer-groups", "2", "--group", "3"], "--group is 3; it must be from 1 to --layer-groups, 2"),
        (["--new-tokens", "1"], "--new-tokens is 1; it must be at least 2"),
        (["--new-tokens", "5000"], "--new-tokens is 5000; it must be at most 3988"),
        (["--device", "gpu"], "--device is gpu; it must be cpu, or a GPU that torch finds"),
        (["--rows", "2"], "--rows is 2; it must be at least 3"),
        (["--profile", "/no/such.json"], "--profile /no/such.json: No such file"),
        (["--out", "/no/such/folder/p.html"], "--out /no/such/folder/p.html: give the name of a file in a folder"),
        (["--draft", "/no/model"], "/no/model is not a model folder"),
    ],
)
def test_bad_arguments_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(folder, "refused.html", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (folder / "refused.html").exists()


def test_another_target_needs_a_draft_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(folder / "target"), "--out", str(folder / "refused.html")]) == 1
    assert f"--target {folder / 'target'} needs a --draft" in capsys.readouterr().err


def test_a_draft_that_is_no_whole_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = write_eagle(folder / "head", TinyLlama())
    assert run(folder, "refused.html", "--draft", str(head)) == 1
    assert f"{head} is a LlamaForCausalLMEagle; give a whole model" in capsys.readouterr().err


def test_an_answer_that_ends_at_once_is_refused(models: list[TracedModel]) -> None:
    target, draft = models
    decoded = decode(models)
    request = Request(target, draft, auto_profile(draft.shape, target.shape), "hybrid", SIZE, 4, capacity=100)
    with pytest.raises(CalibrationError, match="nothing is verified"):
        request.decode(decoded.ids[: decoded.prompt_tokens], 14, decoded.ids[decoded.prompt_tokens], lambda done: None)


def test_a_prompt_that_is_not_text_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bytes.txt").write_bytes(b"\xff\xfe")
    assert run(folder, "refused.html", "--prompt", str(folder / "bytes.txt")) == 1
    assert "bytes.txt: 'utf-8' codec" in capsys.readouterr().err


def test_a_prompt_beyond_the_models_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "long.txt").write_text("w5 " * 5000)
    assert run(folder, "refused.html", "--prompt", str(folder / "long.txt")) == 1
    assert "--prompt has 5000 tokens; these models take 4086 at most" in capsys.readouterr().err
