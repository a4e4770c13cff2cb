"""The attention benchmark's cases, at a size that the torch references do on the CPU; nothing is timed."""

import attention
import attention_methods
import floors
import pytest
import torch
from attention_methods import attend_ours, dense_step, parts, random_list, selected_step, sparse_step
from pools import Arena, Cell, Workload
from results import Results, read_runs
from selection_chain import ScoredHeads, SelectionChain, scored_heads, scored_layers
from shapes import ATTENTION_SHAPES, SHAPES, AttentionShape, write_shape
from timing import Timing

RUN = dict(machine="m", commit="c")
TARGET = AttentionShape(layers=3, heads=4, kv_heads=2, head_dim=16)
DRAFT = AttentionShape(layers=6, heads=4, kv_heads=2, head_dim=16)
CELL = Cell(TARGET, DRAFT, batch=2, context=150, g=3)


def make_work(cell: Cell = CELL, pools: int = 3) -> Workload:
    torch.manual_seed(0)
    elements = 3 * cell.num_slots * 2 * 16 + 2 * pools * cell.num_slots * 2 * 16
    return Workload(cell, Arena(2 * elements, "cpu"), "cpu", scored_layers=3)


def test_the_shapes_have_the_published_models_kv_bytes_a_token() -> None:
    targets = {name: target.token_bytes for name, (target, _) in ATTENTION_SHAPES.items()}
    assert targets == {
        "qwen2.5-72b": 327680,
        "llama-3.1-8b": 131072,
        "qwen2.5-14b": 196608,
        "qwen2.5-72b-tp4": 81920,
        "llama-3.1-8b-tp4": 32768,
        "qwen2.5-14b-tp4": 49152,
    }
    draft = ATTENTION_SHAPES["qwen2.5-72b"][1]
    assert (draft.layers, draft.heads, draft.kv_heads, draft.head_dim) == (24, 14, 2, 64)


def test_a_shard_has_a_quarter_of_the_heads_and_at_least_one_kv_head() -> None:
    assert AttentionShape.of("qwen2.5-72b", 4) == AttentionShape(80, 16, 2, 128, 4)
    assert AttentionShape.of("draft-1.5b", 4) == AttentionShape(28, 3, 1, 128, 4)
    with pytest.raises(ValueError, match="14 heads; they cannot be divided by 4"):
        AttentionShape.of("draft-0.5b", 4)


def test_the_configs_have_the_published_models_parameters() -> None:
    def parameters(name: str) -> float:
        c = SHAPES[name]
        heads = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        attention_weights = c["hidden_size"] * (heads + c["num_attention_heads"] * c["head_dim"])
        layer = attention_weights + 3 * c["hidden_size"] * c["intermediate_size"]
        return (c["num_hidden_layers"] * layer + 2 * c["vocab_size"] * c["hidden_size"]) / 1e9

    assert parameters("llama-3.1-8b") == pytest.approx(8.03, abs=0.01)
    assert parameters("qwen2.5-14b") == pytest.approx(14.77, abs=0.01)
    assert parameters("qwen2.5-72b") == pytest.approx(72.7, abs=0.05)


def test_a_draft_takes_the_targets_vocabulary(tmp_path) -> None:
    folder = write_shape("draft-0.5b", tmp_path, vocab_size=152064)
    assert '"vocab_size": 152064' in (folder / "config.json").read_text()


def test_floors_by_hand() -> None:
    target, draft = ATTENTION_SHAPES["qwen2.5-72b"]
    cell = Cell(target, draft, batch=16, context=32768, g=5)
    kv = 16 * (512 + 5) * (2 * 8 * 128 * 2 + 4)
    rows = 16 * 5 * 64 * 128 * 2
    assert floors.attention_bytes(cell, 512) == kv + 2 * rows
    assert floors.microseconds(4_300_000, 4.3) == pytest.approx(1.0)
    ahead, history = scored_heads("3x4", target, draft)
    assert (ahead.distinct_kv_heads, history.distinct_kv_heads) == (6, 4)
    assert floors.score_bytes(cell, ahead) == 16 * 32768 * (6 * 64 * 2 + 8)
    assert scored_heads("half", target, draft)[0].distinct_kv_heads == 24
    assert floors.select_bytes(cell, 512) == 16 * (8 * 32768 + 4 * 512)
    assert floors.write_bytes(cell, 512) == 16 * (4 * 512 + 8 * 517)


def test_scored_heads_are_spread_over_the_kv_heads() -> None:
    draft = ATTENTION_SHAPES["qwen2.5-72b"][1]
    heads = ScoredHeads.spread(draft, 2, 4)
    assert heads.heads == (0, 3, 7, 10)
    assert heads.kv_heads == (0, 0, 1, 1) * 2
    assert heads.layer_of_head == (0,) * 4 + (1,) * 4
    assert scored_layers("half", draft) == 12
    assert ScoredHeads.spread(AttentionShape.of("draft-1.5b", 4), 1, 4).heads == (0,)


@pytest.mark.parametrize("slots", ["contiguous", "scattered"])
def test_dense_and_sparse_steps_attend_to_what_they_list(slots: str) -> None:
    work = make_work(Cell(TARGET, DRAFT, batch=2, context=150, g=3, slots=slots))
    dense = dense_step("ours", work)
    assert len(dense.calls) == TARGET.layers
    dense.calls[0]()
    sparse = sparse_step("ours-sparse", work, 150)  # lists everything
    sparse.calls[0]()
    assert torch.equal(sparse.out, dense.out)
    fewer = sparse_step("ours-sparse", work, 100)
    fewer.calls[0]()
    assert not torch.allclose(fewer.out, dense.out, atol=1e-3)


def test_the_paper_like_step_computes_the_same_attention() -> None:
    work = make_work()
    ours, eager = dense_step("ours", work), dense_step("paper-like", work)
    ours.calls[1]()
    eager.calls[1]()
    torch.testing.assert_close(eager.out, ours.out, atol=2e-2, rtol=2e-2)


def test_a_second_round_through_the_pools_reads_another_list() -> None:
    work = make_work(pools=2)
    assert len(work.keys) == 2
    step = sparse_step("ours-sparse", work, 100)
    assert step.lists == 2
    outputs = []
    for call in step.calls:
        call()
        outputs.append(step.out.clone())
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


def test_a_selected_step_reads_the_list_that_was_selected() -> None:
    work = make_work()
    step = selected_step("ours-sparse+selection", work, 100, "3x4")
    assert len(step.calls) == 1 + TARGET.layers
    for call in step.calls[:2]:
        call()
    kv_indices = torch.zeros(1, 2 * 103, dtype=torch.int32)
    SelectionChain(work, "3x4", 100, kv_indices)()
    out = torch.empty_like(work.q)
    attend_ours(work, kv_indices[0], 100, out)(0)()
    assert torch.equal(out, step.out)
    assert not torch.equal(kv_indices[0], random_list(work, 100, seed=0))


def test_a_selected_step_of_groups_reads_a_list_a_group() -> None:
    """Three layers fall into two groups: the first is layer 0, the second layers 1 and 2."""
    work = make_work()
    step = selected_step("ours-sparse+selection", work, 100, "3x4", groups=2)
    kv_indices = torch.zeros(2, 2 * 103, dtype=torch.int32)
    SelectionChain(work, "3x4", 100, kv_indices)()
    assert step.lists == 2 and not torch.equal(kv_indices[0], kv_indices[1])
    step.calls[0]()
    for layer, group in enumerate((0, 1, 1)):
        step.calls[1 + layer]()
        out = torch.empty_like(work.q)
        attend_ours(work, kv_indices[group], 100, out)(layer)()
        assert torch.equal(out, step.out)


class InstantTimer:
    """Runs every call once and says that the graph took 81 us a call."""

    def time(self, calls, *, whole: bool = False) -> Timing:
        for call in calls:
            call()
        return Timing(81.0 * len(calls), 80.0 * len(calls), 82.0 * len(calls), len(calls), 1)


def test_rows_hold_times_a_layer_and_the_floor_of_what_they_do() -> None:
    runner = attention.CellRunner(make_work(), InstantTimer(), bandwidth=4.3)  # type: ignore[arg-type]
    dense = runner.measure("ours", None, None)
    assert (dense["median_us"], dense["step_us"], dense["layers_timed"], dense["pools"]) == (81.0, 243.0, 3, 3)
    assert dense["spread"] == [80.0, 82.0]
    selected = runner.measure("ours-sparse+selection", 100, "half")
    assert selected["median_us"] == 81.0 * 4 / 3  # three layers share the selection
    assert runner.measure("roofline", None, None)["over_floor"] == 1.0
    parts_us = {method: runner.measure(method, 100, "3x4")["floor_us"] for method in attention.GROUPS["selection"]}
    whole = parts_us.pop("selection")
    assert whole == pytest.approx(sum(parts_us.values()), abs=0.02)
    grouped = {method: runner.measure(method, 100, "3x4", 2)["floor_us"] for method in attention.GROUPS["selection"]}
    assert grouped["score-lookahead"] == parts_us["score-lookahead"], "groups share the lookahead"
    assert grouped["score-history"] == parts_us["score-history"], "and the history"
    assert whole <= grouped["selection"] <= 2 * whole


def test_the_parts_of_a_selection_run_one_by_one() -> None:
    work = make_work()
    calls = parts(work, 100, "3xall")
    scores = calls["score-lookahead"]()
    assert scores[:, 1:].sum(1).tolist() == pytest.approx([1, 1], rel=0.1), "means over rows, layers and heads"
    positions = calls["select"]()
    assert positions.shape == (2, 100)
    assert all(len(set(row)) == 100 for row in positions.tolist())


def test_too_small_an_arena_is_refused() -> None:
    with pytest.raises(MemoryError, match="do not fit in the arena"):
        make_work(pools=1)


def test_a_run_measures_every_row_once_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(ATTENTION_SHAPES, "qwen2.5-72b", (TARGET, DRAFT))
    monkeypatch.setitem(attention_methods._ATTEND, "flashinfer", attend_ours)
    small = [
        "--shapes",
        "qwen2.5-72b",
        "--contexts",
        "150",
        "--batches",
        "1",
        "2",
        "--ks",
        "100",
        "--arena-gib",
        ".001",
    ]
    small += ["--methods", "flashinfer", "ours", "paper-like", "roofline", "sparse", "selection"]
    path = tmp_path / "attention.json"
    args = attention.parse(small)
    attention.run(args, Results(path, attention.KEY, {}, RUN), InstantTimer(), "cpu")  # type: ignore[arg-type]
    rows = read_runs(path)[0]["rows"]
    assert len(rows) == 2 * (4 + 4 + 4 + 6)
    assert all(row["ratio"] > 0 for row in rows if row["k"] and "ours" in row["method"])
    assert all(row["difference"] == 0 for row in rows if row["method"] == "ours-sparse")
    shares = {row["selection_share"] for row in rows if row["method"] in attention.SELECTED}
    assert shares == {0.25}  # four calls where there were three
    more = attention.parse([*small, "--contexts", "150", "160"])
    attention.run(more, Results(path, attention.KEY, {}, RUN, resume=True), InstantTimer(), "cpu")  # type: ignore[arg-type]
    assert [row["context"] for row in read_runs(path)[1]["rows"]] == [160] * 36


def test_a_method_that_fails_leaves_the_other_rows(tmp_path, monkeypatch, capsys) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(ATTENTION_SHAPES, "qwen2.5-72b", (TARGET, DRAFT))
    monkeypatch.setitem(attention_methods._ATTEND, "flashinfer", broken)
    small = ["--shapes", "qwen2.5-72b", "--contexts", "150", "--batches", "1", "--arena-gib", "0.001"]
    args = attention.parse([*small, "--methods", "flashinfer", "ours"])
    results = Results(None, attention.KEY, {}, RUN)
    with pytest.raises(SystemExit, match="1 rows failed"):
        attention.run(args, results, InstantTimer(), "cpu")  # type: ignore[arg-type]
    assert [row["method"] for row in results.rows] == ["ours"]
    assert "no kernel image" in capsys.readouterr().out


def test_rows_of_a_cell_begin_with_the_baseline_and_follow_the_filters() -> None:
    args = attention.parse(["--ks", "128", "512", "--lookahead", "half"])
    keys = attention.row_keys(args, "qwen2.5-72b", 16, 512)
    assert keys[0]["method"] == "flashinfer"
    assert {key["k"] for key in keys} == {None, 128}  # 512 positions of 512 are not sparse
    assert len({tuple(key.items()) for key in keys}) == len(keys)
    grouped = attention.row_keys(attention.parse(["--ks", "128", "--groups", "1", "4"]), "qwen2.5-72b", 16, 512)
    several = {key["method"] for key in grouped if key["groups"] == 4}
    assert several == {*attention.SELECTED, "selection"} and {key["groups"] for key in grouped} == {None, 4}
    only = attention.parse(["--methods", "ours-sparse", "roofline", "--ks", "128"])
    assert [key["method"] for key in attention.row_keys(only, "qwen2.5-72b", 1, 8192)] == ["roofline", "ours-sparse"]


def test_budgets_below_the_protected_positions_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        attention.parse(["--ks", "64"])
    assert "--ks has 64; it must be at least 68" in capsys.readouterr().err


def test_a_ratio_is_dense_flashinfers_time_over_the_rows() -> None:
    results = Results(None, attention.KEY, {}, RUN)
    cell = dict(shape="s", batch=1, context=8192, g=5, slots="contiguous", k=None, lookahead=None)
    base = cell | dict(method="flashinfer", median_us=300.0, step_us=900.0)
    assert attention.with_ratio(base, results)["ratio"] == 1.0
    results.add(base)
    sparse = cell | dict(method="ours-sparse", k=512, median_us=10.0, step_us=30.0)
    assert attention.with_ratio(sparse, results)["ratio"] == 30.0
    assert "ratio" not in attention.with_ratio(cell | dict(method="select", k=512, median_us=10.0), results)
