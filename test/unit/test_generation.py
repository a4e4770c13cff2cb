"""Generated answers: items and metrics against cases by hand, engines that resume, rows paired with dense."""

from __future__ import annotations

import argparse
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dense_judge
import generation
import generation_engines
import generation_judge
import generation_longbench
import generation_ruler
import numpy as np
import pytest
import torch
from generation_answers import BUCKET, Answer, Answers, Setting
from generation_items import Item, choose_items, encode, read_items, write_items
from generation_metrics import METRICS, edit_similarity, f1, normalise, rouge_l, score
from generation_rows import make_rows, repeats, summarise
from results import read_runs

RUN = dict(machine="m", commit="c1")
SETTINGS = dict(target="t", draft="d", steps=3, topk=1, profile="auto")


def item(number: int = 0, task: str = "vt", **fields: Any) -> Item:
    given = dict(prompt=f"prompt {number}", answers=["red", "BLUE"], metric="all-answers", new_tokens=8)
    return Item(id=f"{task}-{number}", task=task, context=64, **given | fields)


class Characters:
    """A tokenizer whose tokens are characters."""

    chat_template: str | None = "a template"

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return f"<{messages[0]['content']}>"


@pytest.mark.parametrize("name", ["items.jsonl", "new/items.jsonl.xz"])
def test_items_survive_a_file(tmp_path: Path, name: str) -> None:
    items = [item(0), item(1, prefix=" The", chat=False, classes=["a"], ignore_eos=True, prompt="naïve\n\u2028x")]
    write_items(tmp_path / name, items)
    assert read_items(tmp_path / name) == items


def test_a_line_that_is_no_item_and_a_second_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    write_items(path, [item(0), item(0)])
    with pytest.raises(ValueError, match="line 2: a second item has the id 'vt-0'"):
        read_items(path)
    path.write_text('{"id": "x"}\n')
    with pytest.raises(ValueError, match=r"items\.jsonl, line 1: "):
        read_items(path)


def test_the_template_goes_around_the_prompt_and_before_the_prefix() -> None:
    def text(item: Item) -> str:
        return Characters().decode(encode(item, Characters()))

    assert text(item(prompt="Why?", prefix=" Since")) == "<Why?> Since"
    assert text(item(prompt="Why?", prefix=" Since", chat=False)) == "Why? Since"


def test_a_limit_counts_per_task_and_unknown_tasks_are_refused() -> None:
    items = [item(number, task) for task in ("vt", "qa_1") for number in range(3)]
    assert [i.id for i in choose_items(items, None, None, 2)] == ["qa_1-0", "qa_1-1", "vt-0", "vt-1"]
    assert [i.id for i in choose_items(items, ["vt"], [64], None)] == ["vt-0", "vt-1", "vt-2"]
    with pytest.raises(ValueError, match="--tasks cwe: --items has qa_1 vt"):
        choose_items(items, ["cwe"], None, None)
    with pytest.raises(ValueError, match="--contexts 4096: --items has 64"):
        choose_items(items, None, [4096], None)


def test_string_matches_ignore_case() -> None:
    assert score(item(), "Red and green") == 50
    assert score(item(metric="any-answer"), "Red and green") == 100
    assert score(item(metric="any-answer"), "green") == 0
    assert score(item(answers=[]), "anything") is None


def test_f1_by_hand() -> None:
    assert normalise("The  Cat, an owl's   A.") == ["cat", "owls"]
    # One of two words right, one of three found: 2 * 1 / (2 + 3).
    assert f1("The red dog", "a red cat sat") == pytest.approx(0.4)
    assert f1("red red", "red") == pytest.approx(2 / 3), "a repeated word counts once"
    assert f1("", "red") == 0


def test_rouge_l_by_hand() -> None:
    # "the cat sat" of "the cat sat down" and "the cat on a mat sat": the longest common subsequence has 3 words.
    assert rouge_l("the cat sat down", "the cat on a mat sat") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l("", "red") == rouge_l(" . ", "red") == 0


def test_edit_similarity_takes_the_first_line_of_code() -> None:
    assert edit_similarity("\n```python\n# a comment\nreturn x\nreturn y", "return x") == 1
    assert edit_similarity("abcd", "abxx") == 0.5
    assert edit_similarity("# only a comment", "return x") == 0


def test_numbers_and_labels_by_hand() -> None:
    assert score(item(metric="count", answers=["3"]), "3, or 4, or 3") == pytest.approx(200 / 3)
    assert score(item(metric="retrieval", answers=["Paragraph 12"]), "Paragraph 12") == 100
    assert score(item(metric="retrieval", answers=["Paragraph 12"]), "none") == 0
    labels = dict(metric="classification-first-line", answers=["City name"], classes=["City", "City name", "Person"])
    assert score(item(**labels), "City name\nPerson") == 100, "a part of the right label and later lines do not count"
    assert score(item(**labels), "Person or City name") == 50
    assert score(item(**labels), "Person") == 0
    assert score(item(metric="f1-first-line", answers=["red", "blue"]), "\nblue\nred") == 100, "the best reference"


@pytest.fixture
def longbench(tmp_path: Path) -> argparse.Namespace:
    """Two records of the published form, and prompts and lengths as its repository has them."""
    data, config = tmp_path / "data", tmp_path / "config"
    data.mkdir(), config.mkdir()
    record = dict(input="Who?", context="The mayor\u2028spoke.", answers=["mayor"], length=3, dataset="hotpotqa",
                  language="en", all_classes=None)  # fmt: skip
    lines = [json.dumps(record | dict(_id=name), ensure_ascii=False) for name in ("a", "b")]
    (data / "hotpotqa.jsonl").write_text("\n".join(lines) + "\n")
    few_shot = record | dict(dataset="trec", all_classes=["Person", "City"], answers=["Person"], _id="c")
    (data / "trec_e.jsonl").write_text(json.dumps(few_shot) + "\n")
    (config / "dataset2prompt.json").write_text(json.dumps(dict(hotpotqa="Read {context}\n{input}", trec="{input}")))
    (config / "dataset2maxlen.json").write_text(json.dumps(dict(hotpotqa=32, trec=64)))
    return argparse.Namespace(data=data, config=config)


def test_longbench_records_become_items(longbench: argparse.Namespace) -> None:
    def make(dataset: str, context: int = 4096) -> list[Item]:
        return list(
            generation_longbench.make_items(longbench.data, longbench.config, dataset, context, 100, Characters())
        )

    first, second = make("hotpotqa")
    assert (first.id, second.id, first.metric, first.new_tokens) == ("hotpotqa-4096-a", "hotpotqa-4096-b", "f1", 32)
    assert first.prompt == "Read The mayor\u2028spoke.\nWho?" and first.chat and score(first, "The Mayor.") == 100
    (labelled,) = make("trec_e")
    assert not labelled.chat and labelled.classes == ["Person", "City"] and score(labelled, "Person") == 100
    # 50 tokens less 32 of the answer and 2 of the template leave 16: both ends of the prompt.
    assert make("hotpotqa", 50)[0].prompt == "Read The" + "ke.\nWho?"


def test_longbench_says_what_is_absent(longbench: argparse.Namespace, tmp_path: Path) -> None:
    def make(data: Path, config: Path, dataset: str) -> None:
        list(generation_longbench.make_items(data, config, dataset, 4096, 1, Characters()))

    with pytest.raises(ValueError, match="--datasets dureader: must be one of narrativeqa"):
        make(longbench.data, longbench.config, "dureader")
    with pytest.raises(ValueError, match=r"has no qasper\.jsonl"):
        make(longbench.data, longbench.config, "qasper")
    with pytest.raises(ValueError, match="--longbench-config: .*dataset2prompt.json"):
        make(longbench.data, tmp_path, "hotpotqa")
    with pytest.raises(ValueError, match="no such folder or zip file"):
        generation_longbench.find_data(str(tmp_path / "nowhere"))


def test_longbench_is_read_from_the_hubs_zip_file(
    longbench: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(longbench.data / "hotpotqa.jsonl", "data/hotpotqa.jsonl")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, name, repo_type: str(tmp_path / name))
    data = generation_longbench.find_data("hub")
    assert len(list(generation_longbench.make_items(data, longbench.config, "hotpotqa", 4096, 1, Characters()))) == 1

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ValueError, match="--longbench hub: no route; give the path of a local copy"):
        generation_longbench.find_data("hub")


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the generators' form, whose script writes what it was asked for; returns the script."""
    root = tmp_path / "long_context_eval"
    script = root / "data" / "synthetic" / "qa.py"
    script.parent.mkdir(parents=True)
    (root / "synthetic.yaml").write_text("qa_1: {task: qa, args: {dataset: squad}}")
    script.with_name("constants.py").write_text(
        "TASKS = {'qa': {'tokens_to_generate': 32, 'template': '{context} Q: {query}', 'answer_prefix': ' A:'}}"
    )
    script.write_text(
        "import json, pathlib, sys\n"
        "given = dict(flag[2:].split('=', 1) for flag in sys.argv[1:])\n"
        "folder = pathlib.Path(given['save_dir'], given['save_name'])\n"
        "folder.mkdir()\n"
        "context = given['max_seq_length'] + given['dataset']\n"
        "text = given['template'].format(context=context, query=given['random_seed'])\n"
        "rows = [dict(index=i, input=text, outputs=['x']) for i in range(int(given['num_samples']))]\n"
        "(folder / 'validation.jsonl').write_text('\\n'.join(map(json.dumps, rows)))\n"
    )
    for name in [name for name in sys.modules if name.startswith("long_context_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return script


def test_rulers_prompts_end_where_the_answers_prefix_begins(generators: Path, tmp_path: Path) -> None:
    first, second = generation_ruler.make_items("qa_1", 4096, 2, tmp_path, overhead=20, seed=7)
    assert (first.id, second.id) == ("qa_1-4096-0", "qa_1-4096-1")
    assert (first.prompt, first.prefix) == ("4076squad Q: 7", " A:")
    assert (first.metric, first.new_tokens, first.answers) == ("any-answer", 32, ["x"])


def test_a_generator_that_fails_is_named(generators: Path, tmp_path: Path) -> None:
    generators.write_text("raise SystemExit('no punkt_tab')")
    with pytest.raises(ValueError, match="--ruler qa_1, 4096 tokens: no punkt_tab"):
        list(generation_ruler.make_items("qa_1", 4096, 2, tmp_path, overhead=0, seed=7))


def test_items_of_several_benchmarks_go_to_one_file(
    longbench: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Characters())
    novel = tmp_path / "novel.txt"
    novel.write_text("It was a calm day. " * 500)
    file = tmp_path / "items.jsonl"
    common = ["items", str(file), "--tokenizer", str(tmp_path), "--contexts", "400", "--count", "2"]
    chosen = ["--longbench", str(longbench.data), "--longbench-config", str(longbench.config), "--datasets", "hotpotqa"]
    assert generation.main([*common, *chosen, "--continue", str(novel), "--new-tokens", "100"]) == 0
    items = read_items(file)
    assert [item.task for item in items] == ["hotpotqa", "hotpotqa", "continue", "continue"]
    last = items[-1]
    assert len(encode(last, Characters())) + last.new_tokens == 400 and last.ignore_eos and score(last, "x") is None
    assert last.temperature == 1 and not last.chat and encode(last, Characters())[-1] != ord(">"), "a text, no request"
    assert generation.main(common) == 1
    assert generation.main([*common, *chosen[:2]]) == 1
    assert generation.main([*common, "--continue", str(novel)]) == 1
    errors = capsys.readouterr().err
    for message in ("nothing to make", "--longbench needs --longbench-config", "--contexts 400: leaves no room"):
        assert message in errors


def test_every_longbench_metric_exists() -> None:
    assert set(generation_longbench.METRIC.values()) <= set(METRICS)


def test_settings_are_read_and_become_variables() -> None:
    assert str(Setting.parse("dense")) == "dense"
    setting = Setting.parse("hybrid:256:64")
    assert setting == Setting("hybrid", 256, 64) == Setting.parse(str(setting))
    assert Setting.parse("quest") == Setting("quest", 512, 0)
    assert setting.environment("pair.json") == {
        "DUSTIN_POLICY": "hybrid",
        "DUSTIN_BUDGET": "256",
        "DUSTIN_RECTIFY_INTERVAL": "64",
        "DUSTIN_PROFILE": "pair.json",
    }


@pytest.mark.parametrize("text", ["best", "hybrid:x", "hybrid:20", "hybrid:512:1000", "hybrid:1:2:3", "dense:512"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--settings {text}: "):
        Setting.parse(text)


class Engine:
    """Says the policy that it was started for, after each prompt's length."""

    started: list[str] = []
    calls = 0
    temperatures: list[float] = []

    def __init__(self, args: argparse.Namespace, tokens: int, running: int) -> None:
        self.policy = os.environ["DUSTIN_POLICY"]
        Engine.started.append(self.policy)

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        Engine.calls += 1
        Engine.temperatures += [params["temperature"] for params in sampling_params]
        ids = [ord(letter) for letter in self.policy]
        return [dict(output_ids=ids, meta_info=dict(spec_verify_ct=2)) for _ in input_ids]

    def shutdown(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with engines that need no model."""
    for name in ("POLICY", "BUDGET", "RECTIFY_INTERVAL", "PROFILE"):
        monkeypatch.setenv(f"DUSTIN_{name}", "")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    monkeypatch.setattr(generation_engines, "start_engine", Engine)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Characters())
    monkeypatch.setattr(generation, "describe_run", lambda: RUN)
    Engine.started, Engine.calls, Engine.temperatures = [], 0, []
    answers = ["dense", "hybrid"]
    write_items(tmp_path / "items.jsonl", [item(n, answers=answers[: 1 + n % 2], new_tokens=80) for n in range(5)])

    def run(*arguments: str) -> int:
        files = [str(tmp_path / "items.jsonl"), str(tmp_path / "answers.jsonl")]
        return generation.main(["answer", *files, "--target", str(tmp_path), "--running", "1", *arguments])

    return run


def test_an_engine_a_setting_answers_and_resuming_starts_none(run: Any, tmp_path: Path) -> None:
    assert run("--settings", "dense", "hybrid:256", "--limit", "4") == 0
    assert Engine.started == ["dense", "hybrid"] and Engine.calls == 2, "four items a call"
    assert run("--settings", "dense", "hybrid:256", "--limit", "4", "--resume") == 0
    assert len(Engine.started) == 2
    assert run("--settings", "dense", "--resume") == 0
    assert Engine.started[2:] == ["dense"], "the fifth item"
    answers = Answers(tmp_path / "answers.jsonl")
    assert [len(answers.of(setting)) for setting in answers.settings()] == [5, 4]


def test_time_that_is_up_starts_no_engine(run: Any) -> None:
    assert run("--settings", "dense", "--minutes", "0") == 0
    assert not Engine.started


def test_answers_become_rows_of_their_run(run: Any, tmp_path: Path) -> None:
    assert run("--settings", "dense", "hybrid:256") == 0
    result, files = tmp_path / "quality.json", [str(tmp_path / name) for name in ("items.jsonl", "answers.jsonl")]
    for _ in range(2):
        assert generation.main(["score", *files, "--json", str(result)]) == 0
    (measured,) = read_runs(result)
    assert measured["run"] == RUN and measured["settings"]["running"] == 1
    dense, sparse = measured["rows"]
    # Dense is right on all three items that ask for it alone and half right on the others; hybrid never and half.
    assert (dense["policy"], dense["k"], dense["n"], dense["score"]) == ("dense", None, 5, 80)
    assert (sparse["policy"], sparse["k"], sparse["score"], sparse["dense_score"]) == ("hybrid", 256, 20, 80)
    assert (sparse["dense_minus_score"], sparse["accept_length"]) == (60, 3)
    low, high = sparse["ci"]["dense_minus_score"]
    assert 0 <= low < 60 < high <= 100 and dense["ci"]["dense_minus_score"] == [0, 0]


def test_answers_of_other_models_and_prompts_beyond_the_context_are_refused(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--settings", "dense", "--limit", "1") == 0
    assert run("--settings", "dense", "--draft", "other") == 1
    assert "name another file" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 90}')
    assert run("--settings", "dense") == 1
    assert "--items: vt-0 has 90 tokens with its answer" in capsys.readouterr().err


def test_a_newer_answer_replaces_an_older_one_and_a_part_of_the_items_is_paired(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.jsonl")
    answers.begin(RUN, SETTINGS)
    answers.add([Answer(f"vt-{n}", "dense", "red blue", [1, 2], 1) for n in range(3)])
    answers.add([Answer("vt-0", "streaming:512:0", "no", [1], 1)])
    answers.begin(RUN | dict(commit="c2"), SETTINGS)
    answers.add([Answer("vt-0", "streaming:512:0", "red", [1], 1), Answer("vt-1", "streaming:512:0", "no", [1, 2], 1)])
    rows = list(make_rows([item(n) for n in range(3)], Answers(tmp_path / "answers.jsonl"), seed=0))
    assert [(run, row["policy"], row["n"]) for run, row in rows] == [(0, "dense", 3), (1, "streaming", 2)]
    assert (rows[1][1]["score"], rows[1][1]["dense_score"], rows[1][1]["profile"]) == (25, 100, None)


def test_the_average_counts_tasks_alike() -> None:
    def table(*scores: float) -> np.ndarray:
        return np.array([[score, 100, 4, 2, 6, 2] for score in scores], dtype=float)

    fields = summarise([table(0, 0, 0, 0), table(100)], seed=0)
    assert (fields["n"], fields["score"], fields["dense_minus_score"], fields["accept_length"]) == (5, 50, 50, 2)
    assert fields["ci"]["score"] == [50, 50], "within each task, all items are equal"


class Counting:
    """A model of 7 tokens whose next one is the last plus 1, read as transformers reads, with a cache."""

    device, config = "cpu", SimpleNamespace(vocab_size=7)
    read = 0

    def __call__(self, ids: torch.Tensor, past_key_values: Any, use_cache: bool, logits_to_keep: int) -> Any:
        Counting.read += ids.numel()
        zeros = torch.zeros(1, 1, ids.shape[1], 1)
        past_key_values.update(zeros, zeros, 0)
        logits = torch.nn.functional.one_hot((ids + 1) % 7, 7) * 10.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_the_judge_reads_a_prompt_once_for_all_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_judge, "PART", 4)
    Counting.read = 0
    (own, logprobs), (other, _) = dense_judge.judge(Counting(), [1, 2, 3, 4, 5, 6], [[0, 1, 2, 3, 4, 5], [0, 3, 4]])
    assert own.tolist() == [True] * 6 and other.tolist() == [True, False, True]
    assert Counting.read == 6 + 5 + 2 and torch.allclose(logprobs, torch.tensor(-0.00027), atol=1e-5)
    assert dense_judge.judge(Counting(), [1], [[2]])[0][0].tolist() == [True]


def test_long_answers_are_judged_by_bucket_once_and_paired_with_dense_ones(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(tmp_path / "items.jsonl"), str(tmp_path / "answers.jsonl")]
    long = [item(n, answers=[], ignore_eos=True, temperature=1.0) for n in range(2)]
    write_items(tmp_path / "items.jsonl", [*long, item(2)])
    assert run("--settings", "dense", "hybrid") == 0 and Engine.temperatures == [1, 1, 0] * 2
    agrees = {"dense": [True] * BUCKET + [True] * 2, "hybrid": [True] * BUCKET + [False, True]}
    verdicts = [(torch.tensor(a), torch.tensor(a).float() - 1) for a in agrees.values()]
    before = [row for _, row in make_rows(long, Answers(tmp_path / "answers.jsonl"), seed=0)]
    assert [row["repeated"] for row in before] == [0, 0] and "agreement" not in before[0]
    short = [row for _, row in make_rows([item(2)], Answers(tmp_path / "answers.jsonl"), seed=0)]
    assert "repeated" not in short[0]
    loaded: list[object] = []
    monkeypatch.setattr(generation_judge, "load_judge", loaded.append)
    monkeypatch.setattr(generation_judge, "judge", lambda model, prompt, ids: verdicts[: len(ids)])
    for _ in range(2):
        assert generation.main(["judge", *files, "--target", str(tmp_path)]) == 0
    assert len(loaded) == 1, "nothing is judged twice"
    answers = Answers(tmp_path / "answers.jsonl")
    assert [len(answers.of(setting)) for setting in ("dense", "hybrid:512:0")] == [3, 3]
    rows = [row for _, row in make_rows(read_items(tmp_path / "items.jsonl"), answers, seed=0)]
    dense, hybrid = rows[0], rows[len(rows) // 2]
    assert (hybrid["agreement_by_256"], hybrid["logprob_by_256"], hybrid["judged"]) == ([1, 0.5], [0, -0.5], 2)
    assert (dense["agreement"], hybrid["agreement"], hybrid["dense_minus_agreement"]) == (1, 0.75, 0.25)
    assert (hybrid["logprob"], hybrid["dense_minus_logprob"]) == (-0.25, 0.25)
    assert hybrid["ci"]["dense_minus_agreement"] == [0.25, 0.25] and hybrid["ci"]["accept_length"] == [3, 3]
    assert (hybrid["repeated"], hybrid["dense_minus_repeated"]) == (0, 0)


def test_a_token_repeats_where_it_ends_sixteen_that_were_there() -> None:
    verse = list(range(20))
    again = repeats([*verse, 99, *verse, 7])
    assert again == [False] * 36 + [True] * 5 + [False]


def test_judging_needs_answers(tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "items.jsonl"), str(tmp_path / "none.jsonl")]
    assert generation.main(["judge", *files, "--target", str(tmp_path)]) == 1
    assert "none.jsonl: no such file" in capsys.readouterr().err
