"""The quality harness: every policy's rows, values against direct computation, intervals against cases by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import plots
import pytest
import quality
import torch
from quality_methods import CHOICES, Method, make_profiles
from quality_statistics import Bootstrap, summarise
from quality_texts import JUMP_STEP, NEEDLES, Passage, Place, make_passage
from quality_windows import Reading, captured_masses, measure
from tiny_models import TinyLlama, write_llama

from dustin_sglang.calibrate.mass import ListSize, listed_mass
from dustin_sglang.calibrate.search import score
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.texts import Passage as WholePassage
from dustin_sglang.calibrate.texts import Texts
from dustin_sglang.calibrate.trace import TracedModel
from dustin_sglang.calibrate.windows import collect
from dustin_sglang.profile import Profile, ProfileError, auto_profile, save_profile

TARGET = TinyLlama(num_layers=3)
DRAFT = TinyLlama(hidden_size=48, num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, seed=4)
IDS = torch.randint(3, 256, (130,), generator=torch.Generator().manual_seed(0)).tolist()
ROWS, SIZE = 4, ListSize(budget=24, sinks=2, window=3)
DEFAULT = ("hybrid-sum", "automatic", 0.5)
PASSAGE = Passage(IDS, [Place(90, 80), Place(110, 100), Place(120, 120)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    write_llama(root / "target", TARGET)
    write_llama(root / "draft", DRAFT)
    words = torch.randint(3, 256, (6000,), generator=torch.Generator().manual_seed(1)).tolist()
    (root / "novel.txt").write_text(" ".join(f"w{word}" for word in words))
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[TracedModel, TracedModel]:
    target, draft = (TracedModel(folder / role, "cpu", torch.float32) for role in ("target", "draft"))
    return target, draft


@pytest.fixture(scope="module")
def profile(pair: tuple[TracedModel, TracedModel]) -> Profile:
    return auto_profile(pair[1].shape, pair[0].shape)


@pytest.fixture(scope="module")
def reading(pair: tuple[TracedModel, TracedModel], profile: Profile) -> Reading:
    return Reading(*pair, PASSAGE, ROWS, {"automatic": profile})


def run(folder: Path, *arguments: str) -> int:
    common = [
        "--target",
        str(folder / "target"),
        "--draft",
        str(folder / "draft"),
        "--prose",
        str(folder / "novel.txt"),
    ]
    few = ["--tasks", "prose", "--contexts", "256", "--windows", "20", "--device", "cpu"]
    return quality.main([*common, *few, *arguments])


def test_every_policy_has_a_row_at_every_budget_and_resuming_adds_nothing(folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "quality.json"
    arguments = ["--ks", "96", "256", "--profile", "auto", "random-heads", "--shares", "1", "--json", str(result)]
    arguments += ["--groups", "1", "2"]
    assert run(folder, *arguments) == 0
    (measured,) = json.loads(result.read_text())["runs"]
    rows = measured["rows"]
    for k in (96, 256):
        assert {row["policy"] for row in rows if row["k"] == k} == set(CHOICES)
    assert {row["groups"] for row in rows if row["policy"] == "oracle"} == {1, 2, TARGET.num_layers}
    groups = {row["policy"]: {r["groups"] for r in rows if r["policy"] == row["policy"]} for row in rows}
    assert groups["hybrid"] == groups["history"] == groups["quest"] == {1, 2} and groups["hybrid-depth"] == {2}
    assert all(groups[name] == {1} for name in ("lookahead", "snapkv", "streaming", "random"))
    assert {row["profile"] for row in rows if row["policy"] == "history"} == {"automatic", "random-heads"}
    assert {row["lookahead_share"] for row in rows if row["policy"] == "hybrid"} == {0.5, 1}
    assert all((row["n"], row["passages"]) == (20, 2) for row in rows)
    assert all(row["ci"]["kl"][0] <= row["kl"] <= row["ci"]["kl"][1] for row in rows)
    # A budget above the context lists everything.
    whole = [row for row in rows if row["k"] == 256]
    assert all(abs(row["kl"]) < 1e-5 and row["agreement"] == 1 and row["mass"] == pytest.approx(1) for row in whole)
    assert any(row["kl"] > 1e-3 for row in rows if row["k"] == 96)
    default = [row for row in rows if (row["policy"], row["profile"], row["lookahead_share"]) == DEFAULT]
    default = [row for row in default if row["groups"] == 1]
    assert len(default) == 2 and all(row["kl_minus_default"] == 0 for row in default)

    before = result.read_text()
    assert run(folder, *arguments, "--resume", "--any-commit") == 0
    assert result.read_text() == before
    assert run(folder, *arguments, "--resume", "--any-commit", "--policies", "streaming", "--windows", "21") == 0
    assert len(json.loads(result.read_text())["runs"]) == 2, "rows of too few windows are measured again"
    assert plots.plot_quality(rows) is not None


def test_time_that_is_up_leaves_no_row(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "--ks", "128", "--minutes", "0", "--json", str(tmp_path / "quality.json")) == 0
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.parametrize("policy", ["hybrid", "streaming"])
def test_a_window_equals_a_direct_computation(
    pair: tuple[TracedModel, TracedModel], reading: Reading, policy: str
) -> None:
    method = Method(policy, 1, *(("automatic", 0.5, True) if policy == "hybrid" else ()))
    values = measure(reading, [method, Method("oracle")], SIZE)[method]
    lists = reading.lists(method, SIZE)
    prefix = Prefix(pair[0], IDS)
    for w, place in enumerate(PASSAGE.places):
        (outcome,) = prefix.compare(place.length, ROWS, lists[w])
        following = torch.tensor(IDS[place.length + 1 : place.length + ROWS + 1])
        sparse = prefix.verify(place.length, ROWS, lists[w])[0]
        own = pair[0].read(IDS, lambda layer: None, list(range(place.length, place.length + ROWS)))
        expected = [
            outcome.kl,
            outcome.agreement,
            listed_mass(lists[w, 0], reading.oracle[w].sum(0)[: place.length], SIZE),
            float(torch.nn.functional.cross_entropy(sparse, following)),
            float(torch.nn.functional.cross_entropy(own, following)),
        ]
        assert values[w].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("extra_step", [False, True])
def test_scores_are_those_of_calibration(
    pair: tuple[TracedModel, TracedModel], reading: Reading, profile: Profile, extra_step: bool
) -> None:
    lengths = [place.length for place in PASSAGE.places]
    windows, _ = collect(*pair, WholePassage(IDS, lengths, None), ROWS, SIZE, extra_step)
    for w, (n, window) in enumerate(zip(lengths, windows)):
        ahead = score(window.lookahead, profile.lookahead) / ((ROWS - 1 + extra_step) * profile.lookahead.count)
        back = score(window.history, profile.history) / profile.history.count
        torch.testing.assert_close(reading.lookahead["automatic", 1, extra_step][0, w, :n], ahead, atol=1e-4, rtol=1e-2)
        torch.testing.assert_close(reading.history["automatic", 1][0, w, :n], back, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(reading.oracle[w, :, :n].sum(0), window.oracle)


def test_groups_read_their_own_lists(pair: tuple[TracedModel, TracedModel], profile: Profile) -> None:
    """Layer 0 is the first group, layers 1 and 2 the second, whose history is the one list's."""
    reading = Reading(*pair, PASSAGE, ROWS, {"automatic": profile}, [1, 2])
    one, two = (reading.lists(Method("history", groups, "automatic"), SIZE) for groups in (1, 2))
    assert torch.equal(two[:, 1], one[:, 0]) and not torch.equal(two[:, 0], one[:, 0])
    depth = reading.lists(Method("hybrid-depth", 2, "automatic", None, True), SIZE)
    assert torch.equal(depth[:, 0], reading.lists(Method("lookahead", 1, "automatic", None, True), SIZE)[:, 0])
    assert torch.equal(depth[:, 1], two[:, 1])
    assert torch.equal(reading.by_layer(two), two[:, [0, 1, 1]])
    oracle = reading.lists(Method("oracle", 2), SIZE)
    whole = captured_masses(oracle[:1, [0]].long(), reading.oracle[0, [0], :90], SIZE)
    assert whole.item() == pytest.approx(1), "the first group is one layer, whose best list it is"


def test_lists_differ_from_layer_to_layer_only_for_the_oracle_per_layer(reading: Reading) -> None:
    per_layer, one = (reading.lists(Method("oracle", groups), SIZE) for groups in (TARGET.num_layers, 1))
    for layer in range(TARGET.num_layers):
        best = captured_masses(per_layer[:1, [layer]].long(), reading.oracle[0, [layer], :90], SIZE)
        shared = captured_masses(one[:1].long(), reading.oracle[0, [layer], :90], SIZE)
        assert best.item() == pytest.approx(1) and shared.item() <= 1
    values = measure(reading, [Method("oracle"), Method("oracle", TARGET.num_layers)], SIZE)
    masses = [float(table[:, 2].mean()) for table in values.values()]
    assert masses[0] == pytest.approx(1) and masses[1] > 1


def test_snapkv_keeps_the_prompts_list_and_adds_what_came_later(reading: Reading) -> None:
    lists = reading.lists(Method("snapkv", 1, "automatic"), SIZE)
    history = reading.lists(Method("history", 1, "automatic"), SIZE)
    assert set(range(80, 90)) <= set(lists[0, 0].tolist())
    assert lists[2].equal(history[2]), "a window at the end of the prompt"


def test_intervals_by_hand() -> None:
    # Two passages of one and of three windows: resamples are A A (mean 0), A B and B A (3/4), B B (1).
    bootstrap = Bootstrap([1, 3], seed=0, resamples=4000)
    passages = [np.array([[0.0, 5.0]]), np.array([[1.0, 6.0]] * 3)]
    means = bootstrap.means(passages)
    assert means[0].tolist() == [0.75, 5.75]
    assert bootstrap.interval(means[:, 0]) == [0, 1]
    assert [float((means[1:, 0] == x).mean()) for x in (0, 0.75, 1)] == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    # Pairing: what always differs by 5 differs by 5 in every resample.
    assert bootstrap.interval(means[:, 1] - means[:, 0]) == [5, 5]
    assert Bootstrap([3], seed=0).interval(means[:, 0]) is None


def test_statistics_by_hand() -> None:
    means = np.array([[0.4, 0.5, 0.9, np.log(6), np.log(4)]] * 3)
    oracle = np.array([[0.1, 1, 1, 0, 0]] * 3)
    fields = summarise(means, oracle, means, Bootstrap([1, 1], seed=0, resamples=2))
    assert (fields["kl"], fields["kl_over_oracle"], fields["kl_minus_default"]) == (0.4, 4, 0)
    assert (fields["perplexity"], fields["dense_perplexity"], fields["perplexity_difference"]) == (6, 4, 2)
    assert fields["ci"]["kl_over_oracle"] == [4, 4]
    assert summarise(means, oracle * 0, None, Bootstrap([1, 1], seed=0, resamples=2))["kl_over_oracle"] is None


@pytest.mark.parametrize("task", ["needles", "jumps"])
def test_windows_of_needles_verify_the_answers(task: str) -> None:
    """One character is a token here."""
    passage = make_passage(task, characters(), 0, 8000, 5, seed=0)
    text = "".join(map(chr, passage.ids))
    assert max(place.length for place in passage.places) <= 8000 < len(text) - 5
    for place in passage.places:
        asked, answer = text[: place.prompt].rsplit("Question: ", 1)[1], text[place.prompt :].split(".")[0].strip()
        assert asked.endswith("The code is" if task == "needles" else "The numbers are")
        places = asked.split("the safe")[1].split("?")[0] if task == "needles" else asked.split("safes of")[1]
        for said, where in zip([answer] if task == "needles" else answer.split(", "), places.split("the ")[1:]):
            where = where.split(",")[0].strip()
            assert f"The safe of the {where} opens with the {'code' if task == 'needles' else 'number'} {said}." in text
    if task == "needles":
        assert [place.length for place in passage.places] == [place.prompt for place in passage.places]
        assert len(passage.places) == NEEDLES
    else:
        gaps = {b.length - a.length for a, b in zip(passage.places, passage.places[1:]) if a.prompt == b.prompt}
        assert gaps == {JUMP_STEP}


def characters() -> Texts:
    class Tokenizer:
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    texts = Texts([], Tokenizer(), 0, 5, 0)
    texts._texts = ["The sea was calm, and nobody spoke of it. " * 2000]
    return texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "code"], "--code"),
        (["--ks", "68"], "--ks 68"),
        (["--shares", "1.5"], "--shares"),
        (["--groups", "0"], "--groups 0"),
        (["--groups", "4"], "--groups 4: the target has 3 layers"),
        (["--policies", "hybrid-depth"], "hybrid-depth needs an even number among --groups"),
        (["--windows", "0"], "--windows"),
        (["--profile", "auto", "automatic"], "--profile"),
        (["--contexts", "5000"], "--context is 5000"),
    ],
)
def test_bad_values_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(folder, *arguments) == 1
    assert message in capsys.readouterr().err


def test_profiles_by_name(
    folder: Path, pair: tuple[TracedModel, TracedModel], profile: Profile, tmp_path: Path
) -> None:
    shapes = dict(draft=pair[1].shape, target=pair[0].shape)
    paths = dict(draft=folder / "draft", target=folder / "target")
    save_profile(profile, str(tmp_path / "mine.json"))
    names = ["automatic", "all-heads", "random-heads", str(tmp_path / "mine.json")]
    profiles = make_profiles(names, shapes, paths, seed=0)
    assert list(profiles) == ["automatic", "all-heads", "random-heads", "mine"]
    assert profiles["all-heads"].lookahead.by_layer == ((2, (0, 1, 2, 3, 4, 5)), (3, (0, 1, 2, 3, 4, 5)))
    assert (profiles["random-heads"].lookahead.count, profiles["random-heads"].history.count) == (12, 4)
    with pytest.raises(ProfileError, match="no-such"):
        make_profiles(["no-such.json"], shapes, paths, seed=0)
