"""The engine benchmarks without an engine: what is launched, what is computed, what a trace says."""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import end_to_end
import pytest
import serving_sweep
from engine_options import ENGINES, Models, find_models, flags, options, set_environment
from results import Results
from trace_summary import summarise_trace

from dustin_sglang.profile import ModelShape, auto_profile, load_profile

MODELS = Models(Path("/t"), Path("/d"), dummy=True)


class FakeEngine:
    """Answers in 1 s and 10 ms a token."""

    method, forced_accept_length, room = "dustin", 2.0, 10**6

    def generate(self, batch: int, context: int, new_tokens: int) -> end_to_end.Generation:
        return end_to_end.Generation(1.0 + 0.01 * new_tokens, 2.0)


def test_throughput_leaves_out_what_both_generations_share() -> None:
    row = end_to_end.measure(FakeEngine(), 8, 32000, end_to_end.parse([]))  # type: ignore[arg-type]
    assert (row["tok_s"], row["step_ms"], row["accept_length"]) == (800.0, 20.0, 2.0)


def test_a_size_without_room_is_skipped_with_its_numbers() -> None:
    engine = SimpleNamespace(room=1000)
    row = end_to_end.measure(engine, 8, 32000, end_to_end.parse([]))  # type: ignore[arg-type]
    assert row == dict(skipped="needs 257320 KV slots; there are 1000")


def test_ratios_compare_rows_of_one_size() -> None:
    written = Results(None, end_to_end.KEY, {}, dict(machine="m", commit="c"))
    none, standalone, dustin, other = end_to_end.row_keys(end_to_end.parse(["--batches", "8", "--contexts", "32000"]))
    written.add(none | dict(tok_s=100.0))
    written.add(none | dict(batch=1, tok_s=7.0))
    written.add(standalone | dict(tok_s=50.0))
    row = end_to_end.with_ratios(dustin | dict(tok_s=200.0), written)
    assert (row["ratio"], row["ratio_standalone"]) == (2.0, 4.0)
    assert "ratio" not in end_to_end.with_ratios(other | dict(batch=2, tok_s=1.0), written)


def test_the_largest_prompts_come_first_and_engines_do_not_alternate() -> None:
    keys = end_to_end.row_keys(end_to_end.parse(["--batches", "1", "8", "--contexts", "8000", "32000"]))
    assert [(key["context"], key["batch"]) for key in keys[:4]] == [(32000, 8), (32000, 1), (8000, 8), (8000, 1)]
    assert [key["method"] for key in keys[::4]] == list(ENGINES)


def test_prompts_of_dummies_differ() -> None:
    prompts = end_to_end.make_prompts(MODELS, Path(), 3, 5)
    assert {len(prompt) for prompt in prompts} == {5}
    assert len({tuple(prompt) for prompt in prompts}) == 3


@pytest.fixture
def environment() -> Iterator[None]:
    """Whatever a test sets there ends with it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.usefixtures("environment")
def test_a_sparse_draft_is_dustin_with_one_more_variable() -> None:
    """With SGLang's forced acceptance for speed alone, as ATOM #1850 has it."""
    args = end_to_end.parse(["--sparse-draft", "unscored"])
    sparse = options("dustin+sparse-draft", MODELS, args, 8, 1000)
    assert sparse == options("dustin", MODELS, args, 8, 1000)
    assert sparse["speculative_algorithm"] == "dustin" and sparse["speculative_num_draft_tokens"] == 5
    set_environment("dustin+sparse-draft", MODELS, args)
    assert (os.environ["DUSTIN_SPARSE_DRAFT"], os.environ["SGLANG_SIMULATE_ACC_LEN"]) == ("unscored", "3.0")
    set_environment("dustin", Models(Path(), Path(), dummy=False), args)
    assert "DUSTIN_SPARSE_DRAFT" not in os.environ and "SGLANG_SIMULATE_ACC_LEN" not in os.environ


@pytest.mark.usefixtures("environment")
def test_options_of_dustin_reach_its_engines_and_name_their_rows_only_where_they_do_something() -> None:
    given = {"layer-groups": 4, "mass": 0.9, "extra-step": "off", "rectify-interval": 64}
    options_given = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    set_environment("dustin", MODELS, end_to_end.parse(options_given))
    for name, value in given.items():
        assert os.environ["DUSTIN_" + name.replace("-", "_").upper()] == str(value)
    sizes, nothing = ["--batches", "8", "--contexts", "32000"], (None,) * len(given)
    for line, expected in (([], nothing), (options_given, tuple(given.values()))):
        keys = end_to_end.row_keys(end_to_end.parse([*sizes, *line]))
        named = {key["method"]: tuple(key[name.replace("-", "_")] for name in given) for key in keys}
        assert named["dustin"] == expected and named["STANDALONE"] == nothing


def test_no_speculation_has_no_speculative_flag() -> None:
    args = end_to_end.parse([])
    assert not any("speculative" in flag for flag in flags(options("none", MODELS, args, 8, 1000)))
    assert "--disable-prefill-cuda-graph" in flags(options("none", MODELS, args, 8, 1000))


def test_a_shape_with_a_folder_is_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(target="llama-3.1-8b", draft=str(tmp_path))
    with pytest.raises(SystemExit, match="llama-3.1-8b is neither a folder nor"):
        find_models(args, tmp_path)


def test_shapes_share_the_targets_vocabulary(tmp_path: Path) -> None:
    models = find_models(argparse.Namespace(target="qwen2.5-14b", draft="draft-0.5b", layer_groups=1), tmp_path)
    sizes = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (models.target, models.draft)]
    assert models.dummy and sizes == [152064, 152064]


def test_groups_of_shapes_have_a_profile_of_made_up_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUSTIN_PROFILE", "")
    find_models(argparse.Namespace(target="llama-3.1-8b", draft="draft-0.5b", layer_groups=4), tmp_path)
    draft, target = ModelShape(24, 14, 2, 64), ModelShape(32, 32, 8, 128)
    profile = load_profile(os.environ["DUSTIN_PROFILE"], draft, target)
    assert profile.layer_groups == 4 and profile.lookahead == auto_profile(draft, target).lookahead


def test_the_made_up_tokenizer_keeps_tokens_through_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    serving_sweep.write_tokenizer(tmp_path, 200)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 200
    assert tokenizer.encode(tokenizer.decode([5, 12, 123, 199])).ids == [5, 12, 123, 199]


def test_bench_serving_gets_enough_requests_for_the_rate(tmp_path: Path) -> None:
    args = serving_sweep.parse(["--inputs", "8192", "--rates", "0.1", "2", "--seconds", "30", "--methods", "dustin"])
    slow, fast = serving_sweep.row_keys(args)
    counts = []
    for key in (slow, fast):
        arguments = serving_sweep.bench_arguments(args, "http://h", tmp_path, key, tmp_path / "o")
        counts.append(arguments[arguments.index("--num-prompts") + 1])
    assert counts == ["8", "60"]


def test_a_serving_row_has_the_last_output_in_its_own_names() -> None:
    last = dict(completed=8, output_throughput=123.45678, median_ttft_ms=10.0, p99_itl_ms=3.25, accept_length=None)
    row = serving_sweep.read_output("{}\n" + json.dumps(last) + "\n")
    assert (row["tok_s"], row["ttft_p50_ms"], row["itl_p99_ms"], row["accept_length"]) == (123.457, 10.0, 3.25, None)


def test_bench_serving_runs_apart_and_its_last_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cli_main() -> None:
        output = Path(sys.argv[sys.argv.index("--output-file") + 1])
        if sys.argv[sys.argv.index("--base-url") + 1] == "http://down":
            raise RuntimeError("nobody answers")
        output.write_text(json.dumps(dict(completed=3, output_throughput=float(os.getpid()))))

    bench = SimpleNamespace(cli_main=cli_main)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(bench_serving=bench))
    monkeypatch.setitem(sys.modules, "sglang.bench_serving", bench)
    args = serving_sweep.parse(["--methods", "dustin"])
    key, command_line = serving_sweep.row_keys(args)[0], list(sys.argv)
    row = serving_sweep.measure(args, "http://up", tmp_path, key)
    assert row["completed"] == 3 and row["tok_s"] != os.getpid() and sys.argv == command_line
    failed = serving_sweep.measure(args, "http://down", tmp_path, key)
    assert failed == dict(skipped="bench_serving failed: ['RuntimeError: nobody answers']")


class TraceWriter:
    """Writes a trace by hand: one stream, a microsecond between any two kernels."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._now, self._correlation = 0.0, 0

    def kernel(self, name: str, us: float, *more: tuple[str, float], call: str = "cudaLaunchKernel") -> None:
        self._correlation += 1
        args = dict(correlation=self._correlation)
        self.events.append(dict(cat="cuda_runtime", name=call, ts=0, dur=1, args=args))
        for kernel, duration in ((name, us), *more):
            self.events.append(dict(cat="kernel", name=kernel, ts=self._now, dur=duration, args=args))
            self._now += duration + 1

    def graph(self, *kernels: tuple[str, float]) -> None:
        self.kernel(*kernels[0], *kernels[1:], call="cudaGraphLaunch")

    def step(self) -> None:
        """What SGLang and dustin launch up to the next acceptance."""
        self.kernel("gather_accepted", 1)
        self.graph(("nvjet_extend", 10), ("BatchPrefill", 20))
        self.kernel("assign_draft_cache_locs", 2)
        self.graph(("nvjet_draft", 30), ("BatchDecode", 40))
        self.kernel("_statistics_kernel", 3)
        self.kernel("_select_kernel", 4)
        self.kernel("cumsum", 5)
        self.graph(("nvjet_verify", 100), ("BatchPrefill", 50))
        self.kernel("argmax", 6)
        self.kernel("VerifyTreeGreedy<int>", 7)

    def write(self, path: Path) -> Path:
        self.events.append(dict(cat="cuda_runtime", name="cudaStreamSynchronize", ts=0, dur=1, args={}))
        self.events.append(dict(ph="M", name="process_name"))
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": self.events[::-1]}, file)
        return path


def test_a_traces_kernels_are_told_apart_by_phase(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.kernel("prefill", 1000)
    trace.graph(("nvjet_draft", 30))
    trace.graph(("nvjet_verify", 100))
    trace.kernel("VerifyTreeGreedy<int>", 7)
    trace.step()
    trace.step()
    trace.graph(("nvjet_draft", 999))  # an unfinished step
    summary = summarise_trace(trace.write(tmp_path / "t.json.gz"))
    assert summary["steps"] == 3 and summary["host_syncs"] == {"cudaStreamSynchronize": 0.33}
    phases = summary["phases"]
    assert phases["steps"] == 2
    assert phases["us"] == {
        "draft": {"attention": 40, "gemm": 30, "other": 2},
        "score+select": {"score": 3, "select": 4},
        "verify": {"attention": 50, "gemm": 100, "other": 5},
        "sample": {"other": 1 + 6 + 7},
        "draft-extend": {"attention": 20, "gemm": 10},
    }
    assert phases["idle_us"] == 13  # before each of a step's kernels


def test_a_step_with_a_graph_too_many_is_left_out(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.kernel("VerifyTreeGreedy<int>", 7)
    trace.graph(("nvjet_other", 5))
    trace.step()
    trace.step()
    assert summarise_trace(trace.write(tmp_path / "t.json.gz"))["phases"]["steps"] == 1


def test_without_speculation_a_step_is_a_graph(tmp_path: Path) -> None:
    trace = TraceWriter()
    for _ in range(3):
        trace.graph(("nvjet", 100), ("BatchDecode", 50))
        trace.kernel("argmax", 4)
    summary = summarise_trace(trace.write(tmp_path / "t.json.gz"))
    assert summary["steps"] == 3
    assert summary["phases"] == dict(
        steps=2, us={"verify": {"attention": 50, "gemm": 100}, "sample": {"other": 4}}, idle_us=2
    )
