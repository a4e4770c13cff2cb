"""Result files, resuming, and the plots that are drawn from them."""

import json
from pathlib import Path

import end_to_end
import plots
import pytest
import results
from results import Deadline, Results, latest_rows, progress, read_runs

KEY = ("method", "batch")
RUN = dict(machine="m", commit="c1")
RECORDED = results.ROOT / "benchmark" / "results"


def measured(path: Path, *rows: dict, run: dict = RUN) -> None:
    writer = Results(path, KEY, {}, run)
    for row in rows:
        writer.add(row)


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    writer = Results(path, KEY, {"flag": 1}, RUN)
    writer.add(dict(method="a", batch=1, tok_s=5))
    assert read_runs(path) == [dict(run=RUN, settings={"flag": 1}, rows=[dict(method="a", batch=1, tok_s=5)])]
    writer.add(dict(method="b", batch=1))
    assert len(read_runs(path)[0]["rows"]) == 2
    assert list(path.parent.iterdir()) == [path]


def test_a_second_run_keeps_the_first(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    measured(path, dict(method="a", batch=1, tok_s=5))
    measured(path, dict(method="a", batch=1, tok_s=7), dict(method="b", batch=1, tok_s=9))
    assert [len(run["rows"]) for run in read_runs(path)] == [1, 2]
    assert [row["tok_s"] for row in latest_rows(read_runs(path), KEY)] == [7, 9]


@pytest.mark.parametrize(
    ("run", "options", "found"),
    [
        (RUN, dict(), False),
        (RUN, dict(resume=True), True),
        (RUN | dict(commit="c2"), dict(resume=True), False),
        (RUN | dict(commit="c2"), dict(resume=True, any_commit=True), True),
        (RUN | dict(machine="other"), dict(resume=True, any_commit=True), False),
    ],
)
def test_resume_takes_rows_of_this_machine_and_commit(tmp_path: Path, run: dict, options: dict, found: bool) -> None:
    path = tmp_path / "r.json"
    measured(path, dict(method="a", batch=1))
    row = Results(path, KEY, {}, run, **options).find(method="a", batch=1)
    assert (row is not None) == found


def test_rows_of_an_unknown_commit_are_measured_again(tmp_path: Path) -> None:
    path, run = tmp_path / "r.json", RUN | dict(commit=results.UNKNOWN)
    measured(path, dict(method="a", batch=1), run=run)
    assert Results(path, KEY, {}, run, resume=True).find(method="a", batch=1) is None


def test_a_key_field_that_is_not_named_is_none(tmp_path: Path) -> None:
    writer = Results(None, KEY, {}, RUN)
    writer.add(dict(method="a", batch=None))
    assert writer.find(method="a") is not None
    assert writer.find(method="a", batch=1) is None


def test_the_run_names_the_commit_it_is_told(monkeypatch) -> None:
    """MagicDec #7: gains that nobody could reproduce; every recorded run names machine, command and commit."""
    monkeypatch.setenv("DUSTIN_COMMIT", "abc")
    assert results.describe_run()["commit"] == "abc"
    monkeypatch.delenv("DUSTIN_COMMIT")
    monkeypatch.setattr(results, "_git", lambda *arguments: "")
    assert results.describe_run()["commit"] == results.UNKNOWN
    monkeypatch.setattr(results, "_git", lambda *arguments: "f00")
    assert results.describe_run()["commit"] == "f00 with changes"


def test_a_deadline_stops_before_the_next_row() -> None:
    assert list(progress([1, 2], Deadline(None), "row")) == [1, 2]
    assert list(progress([1, 2], Deadline(-1.0), "row")) == []


def test_the_recorded_engine_rows_are_found_by_their_key() -> None:
    runs = read_runs(RECORDED / "end_to_end.json")
    first = end_to_end.parse(["--contexts", "32000", "--batches", "8", "--methods", "none", "STANDALONE", "dustin"])
    keys = end_to_end.row_keys(first)
    for rows in (runs[0]["rows"], latest_rows(runs, end_to_end.KEY)):
        found = [next(r["tok_s"] for r in rows if all(r.get(f) == v for f, v in key.items())) for key in keys]
        none, standalone, dustin = found
        assert standalone < none < dustin
    assert runs[0]["rows"][0]["tok_s"] == pytest.approx(652.8), "recorded runs are never rewritten"


def attention_rows() -> list[dict]:
    cell = dict(shape="qwen2.5-72b", batch=16, g=5, slots="contiguous")
    sizes = [(8192, 200.0), (32768, 800.0)]
    rows = []
    for context, dense in sizes:
        for method, k, us in (("flashinfer", None, dense), ("ours-sparse", 512, 20.0), ("ours-sparse", 128, 9.0)):
            rows.append(cell | dict(context=context, k=k, method=method, lookahead=None, median_us=us, step_us=80 * us))
    return [*rows, cell | dict(context=65536, k=None, method="triton", lookahead=None, skipped="too large")]


def engine_rows() -> list[dict]:
    size = dict(shape="s", draft="d", k=None, g=5, sparse_draft=None, tp=1, accept=3.0, batch=8, context=32000)
    phases = dict(steps=3, us={"draft": {"gemm": 900.0, "attention": 100.0}, "verify": {"gemm": 2000.0}}, idle_us=50.0)
    return [
        size | dict(method="none", tok_s=600.0, step=dict(gpu_us={})),
        size | dict(method="dustin", tok_s=1400.0, step=dict(phases=phases)),
        size | dict(method="STANDALONE", batch=32, skipped="needs 1 KV slots"),
    ]


def serving_rows() -> list[dict]:
    row = dict(shape="s", draft="d", k=None, g=5, sparse_draft=None, tp=1, accept=3.0, input=8192, output=256)
    times = dict(tok_s=100.0, ttft_p50_ms=200.0, itl_p50_ms=9.0)
    return [row | times | dict(method="dustin", rate=rate) for rate in (1.0, 2.0)]


def test_every_plot_is_drawn_from_rows_like_those_recorded(tmp_path: Path) -> None:
    for name, rows in (
        ("attention", attention_rows()),
        ("end_to_end", engine_rows()),
        ("serving", serving_rows()),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": [dict(run=RUN, settings={}, rows=rows)]}))
    drawn = plots.draw_all(tmp_path, tmp_path / "out", shape="qwen2.5-72b", batch=16, k=512)
    assert [path.name for path in drawn] == ["attention.png", "end_to_end.png", "step_time.png", "serving.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_the_attention_plot_draws_the_rows_of_its_budget() -> None:
    figure = plots.plot_attention(attention_rows(), shape="qwen2.5-72b", batch=16, k=512)
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {"dense, FlashInfer fa2": [200.0, 800.0], "sparse, ours": [20.0, 20.0]}


def test_the_bars_of_a_step_add_up_to_its_phases() -> None:
    bars = plots.plot_step(engine_rows()).axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(3.05)


def test_nothing_is_drawn_without_rows(tmp_path: Path) -> None:
    assert plots.draw_all(tmp_path, tmp_path / "out", shape="qwen2.5-72b", batch=16, k=512) == []
