"""The compiled kernels at realistic sizes: against float64 and the references, inside a CUDA graph, without a sync.

Tolerances of the scores. Inputs are the same numbers on both sides, so only float32 arithmetic differs. Logits stay
below about 8 here. A tensor core that truncates its float32 sums loses up to 2**-22 of the largest partial sum in each
of D / 16 steps: 8 * 8 * 2**-22 = 1.5e-5 at D = 128, which is the relative error of a softmax weight. 1e-4 leaves room
for the approximate exponential and for the denominator; plain float32 products stay within 2e-5. A missing row, a head
read from the wrong KV head or a wrong slot changes scores by tens of percent.
"""

import math
import os

import pytest
import torch
import triton
from test_kernels_attend import CAUSAL, TREE
from test_kernels_attend import Case as AttendCase

from dustin_kernels import (
    mix_scores,
    pack_tree_mask,
    score_positions,
    select_positions,
    write_draft_lists,
    write_slots,
)
from dustin_sglang.selection.context import score_width
from dustin_sglang.selection.selector import warm_up_lengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiled kernels, not interpreted ones"),
]
DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 1e-4, torch.float16: 1e-4, torch.float32: 2e-5}
SHAPES = {
    "draft": dict(rows=5, layers=3, heads=14, kv_heads=2, head_dim=64),
    "target": dict(rows=1, layers=1, heads=32, kv_heads=8, head_dim=128),
    "target rows": dict(rows=5, layers=1, heads=64, kv_heads=8, head_dim=128),
    "one kv head": dict(rows=5, layers=1, heads=64, kv_heads=1, head_dim=64),
    "wide": dict(rows=2, layers=2, heads=8, kv_heads=4, head_dim=256),
    "narrow": dict(rows=3, layers=1, heads=6, kv_heads=2, head_dim=16),
}


class Case:
    """Random inputs in a pool of scattered slots; slots that no position uses hold NaN."""

    def __init__(self, seq_lens, *, rows, layers, heads, kv_heads, head_dim, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        options = dict(generator=generator, device=DEVICE)
        bs, self.max_len = len(seq_lens), max(*seq_lens, 1)
        self.layer_of_head = tuple(layer for layer in range(layers) for _ in range(heads))
        self.kv_head_of_head = tuple(head * kv_heads // heads for head in range(heads)) * layers
        self.q = torch.randn(bs, rows, layers * heads, head_dim, dtype=dtype, **options)
        self.seq_lens = torch.tensor(seq_lens, device=DEVICE)
        self.req_pool_indices = torch.randperm(bs + 3, **options)[:bs]
        slots = torch.randperm((bs + 3) * (self.max_len + 9), **options)
        self.req_to_token = slots.view(bs + 3, -1).int()
        self.k_cache = [torch.randn(len(slots), kv_heads, head_dim, dtype=dtype, **options) for _ in range(layers)]
        used = torch.zeros(len(slots), dtype=torch.bool, device=DEVICE)
        for b, n in enumerate(seq_lens):
            used[self.req_to_token[self.req_pool_indices[b], :n].long()] = True
        for keys in self.k_cache:
            keys[~used] = math.nan
        self.scale = head_dim**-0.5

    def run(self, rows=slice(None), **options):
        return score_positions(
            self.q[rows], self.k_cache, self.layer_of_head, self.kv_head_of_head, self.req_to_token,
            self.req_pool_indices[rows], self.seq_lens[rows], self.scale, **{"max_len": self.max_len, **options},
        )  # fmt: skip

    def expected(self, shift=0, head_weights=None):
        """float64, one head at a time."""
        head_weights = head_weights or (1.0,) * len(self.layer_of_head)
        result = torch.zeros(len(self.seq_lens), self.max_len, dtype=torch.float64, device=DEVICE)
        for b, n in enumerate(self.seq_lens.tolist()):
            slots = self.req_to_token[self.req_pool_indices[b], :n].long()
            for head, (layer, kv_head) in enumerate(zip(self.layer_of_head, self.kv_head_of_head)):
                logits = self.q[b, :, head].double() @ self.k_cache[layer][slots, kv_head].double().T * self.scale
                result[b, shift:n] += head_weights[head] * logits.softmax(1).sum(0)[: max(n - shift, 0)]
        return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores(shape, dtype):
    case = Case([1, 127, 0, 128, 129, 4000, 255, 1025], dtype=dtype, seed=1, **SHAPES[shape])
    for shift in (0, 1):
        out = torch.full((8, case.max_len), math.nan, device=DEVICE)
        case.run(shift=shift, out=out)
        torch.testing.assert_close(out.double(), case.expected(shift), rtol=TOLERANCE[dtype], atol=1e-9)


@pytest.mark.parametrize("shape", ["draft", "target"])
@pytest.mark.parametrize("bs", [1, 8, 16])
def test_scores_of_long_contexts(shape, bs):
    case = Case([32000 - 1777 * b for b in range(bs)], seed=2, **SHAPES[shape])
    result = case.run(shift=1)
    torch.testing.assert_close(result.double(), case.expected(1), rtol=TOLERANCE[torch.bfloat16], atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_alone_and_in_a_batch_have_the_same_bits(shape):
    case = Case([9000, 0, 77, 4097], seed=3, **SHAPES[shape])
    together = case.run(shift=1)
    assert torch.equal(case.run(shift=1), together)
    for b, n in enumerate(case.seq_lens.tolist()):
        alone = case.run(slice(b, b + 1), max_len=max(n, 1), shift=1)
        assert torch.equal(alone[0, :n], together[b, :n])


@pytest.mark.parametrize("shape", ["draft", "wide"])
def test_each_part_of_a_score_has_the_bits_of_a_call_of_its_own(shape):
    case = Case([9000, 0, 77, 4097], seed=3, **SHAPES[shape])
    layers = len(case.k_cache)
    heads = len(case.layer_of_head) // layers
    together = case.run(parts=layers, shift=1).unflatten(0, (layers, -1))
    for layer, scores in enumerate(together):
        own = slice(layer * heads, (layer + 1) * heads)
        alone = score_positions(
            case.q[:, :, own], case.k_cache, case.layer_of_head[own], case.kv_head_of_head[own], case.req_to_token,
            case.req_pool_indices, case.seq_lens, case.scale, max_len=case.max_len, shift=1,
        )  # fmt: skip
        assert torch.equal(scores, alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_weighted_heads(shape):
    case = Case([9000, 0, 77, 4097], seed=5, **SHAPES[shape])
    weights = tuple((head % 5) / 2 for head in range(len(case.layer_of_head)))
    result = case.run(shift=1, head_weights=weights)
    expected = case.expected(1, weights)
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[torch.bfloat16], atol=1e-9)


@pytest.mark.parametrize("parts, groups", [(2, 1), (7, 4), (12, 3)])
def test_mixed_scores(parts, groups):
    generator = torch.Generator(DEVICE).manual_seed(parts)
    scores = torch.rand(parts, 5, 30001, generator=generator, device=DEVICE)
    weights = torch.rand(groups, parts, generator=generator, device=DEVICE)
    together = mix_scores(scores, weights)
    expected = torch.einsum("gp,pbn->gbn", weights.double(), scores.double())
    torch.testing.assert_close(together.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(mix_scores(scores[:, 2:3].contiguous(), weights), together[:, 2:3])


def test_scores_of_misaligned_pools():
    """Pools that start 2 bytes off a vector boundary: the loads must not be vectors."""
    case = Case([700], seed=4, **SHAPES["target"])
    expected = case.run()
    for layer, keys in enumerate(case.k_cache):
        moved = torch.empty(keys.numel() + 1, dtype=keys.dtype, device=DEVICE)[1:].view(keys.shape)
        case.k_cache[layer] = moved.copy_(keys)
    torch.testing.assert_close(case.run(), expected, rtol=1e-5, atol=0)


# (heads, KV heads, head_dim, rows) of attention: 72B and 8B targets, 0.5B and 135M drafts, no grouping, an odd width.
ATTEND_SHAPES = {
    "72b": dict(heads=64, kv_heads=8, head_dim=128, rows=5),
    "8b": dict(heads=32, kv_heads=8, head_dim=128, rows=5),
    "0.5b decode": dict(heads=14, kv_heads=2, head_dim=64, rows=1),
    "0.5b extend": dict(heads=14, kv_heads=2, head_dim=64, rows=5),
    "135m": dict(heads=9, kv_heads=3, head_dim=64, rows=4),
    "mha": dict(heads=8, kv_heads=8, head_dim=64, rows=8),
    "wide": dict(heads=8, kv_heads=2, head_dim=256, rows=3),
    "odd": dict(heads=6, kv_heads=2, head_dim=80, rows=3),
    "largest tree": dict(heads=8, kv_heads=2, head_dim=64, rows=64),
}
# Weights are rounded to the inputs' dtype before the second product, and so is the result.
ATTEND_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}


@pytest.mark.parametrize(
    ("shape", "mask", "dtype"),
    [(shape, CAUSAL, torch.bfloat16) for shape in ATTEND_SHAPES]
    + [(shape, TREE, torch.bfloat16) for shape in ("72b", "135m", "largest tree")]
    + [(shape, CAUSAL, dtype) for shape in ("8b", "odd") for dtype in (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("bs", [1, 16])
def test_attention_over_a_list(shape, mask, dtype, bs):
    """Lists of every length around a block and around nothing; the output poisoned before."""
    rows = ATTEND_SHAPES[shape]["rows"]
    lengths = [512 + rows, rows, 600, 63, 0, 1, 65, 64, rows + 1, 127, 128, 129, 333, 256 + rows, 17, 513][:bs]
    case = AttendCase(lengths, mask=mask, dtype=dtype, device=DEVICE, seed=bs, **ATTEND_SHAPES[shape])
    out = torch.full_like(case.q, math.nan)
    case.run("triton", out=out)
    tolerance = ATTEND_TOLERANCE[dtype]
    torch.testing.assert_close(out, case.run("reference"), rtol=tolerance, atol=tolerance)


def test_attention_over_long_lists_and_in_a_graph_at_other_lengths():
    """No plan: a recorded launch follows what kv_indptr says when it is replayed."""
    case = AttendCase([9000, 31000], device=DEVICE, dtype=torch.bfloat16, **ATTEND_SHAPES["8b"])
    out = torch.full_like(case.q, math.nan)
    case.run("triton", out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run("triton", out=out)
    for indptr in ([0, 9000, 40000], [0, 30000, 30007], [5, 5, 2000]):
        case.kv_indptr.copy_(torch.tensor(indptr))
        out.fill_(math.nan)
        graph.replay()
        expected = case.run("reference").double()
        # The last pattern's lists are short: weights and values of order 1, each rounded to 8 bits.
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


def selection_inputs(kind, bs, width):
    generator = torch.Generator(DEVICE).manual_seed(5)
    options = dict(generator=generator, device=DEVICE)
    if kind == "smooth":
        return torch.randn(2, bs, width, **options).mul_(3).softmax(2).unbind()
    if kind == "ties":
        return torch.randint(0, 3, (2, bs, width), **options).float().unbind()
    bits = torch.randint(-(2**31), 2**31 - 1, (2, bs, width), dtype=torch.int32, **options)  # NaN, inf, negative: all
    return bits.view(torch.float32).unbind()


@pytest.mark.parametrize("kind", ["smooth", "ties", "bits"])
@pytest.mark.parametrize(("bs", "width"), [(1, 700), (8, 32000), (16, 131072), (3, 8193)])
@pytest.mark.parametrize("missing", [None, "lookahead", "history"])
def test_selection_equals_the_reference(kind, bs, width, missing):
    lookahead, history = selection_inputs(kind, bs, width)
    seq_lens = (width - torch.arange(bs, device=DEVICE) * (width // 17)).clamp(min=0)
    seq_lens[-1] = width if bs == 1 else 300
    policy = dict(budget=512, sinks=4, window=64, num_lookahead=222)
    inputs = (None if missing == "lookahead" else lookahead, None if missing == "history" else history, seq_lens)
    out = torch.full((bs, 512), 12345, dtype=torch.int32, device=DEVICE)
    select_positions(*inputs, out=out, **policy)
    assert torch.equal(out.cpu(), select_positions(*(x if x is None else x.cpu() for x in inputs), **policy))


@pytest.mark.parametrize("listed", [512, None])
def test_slots_equal_the_reference(listed):
    generator = torch.Generator().manual_seed(6)
    seq_lens = torch.tensor([0, 1, 511, 512, 513, 32000])
    req_to_token = torch.randint(2**31 - 1, (9, 32100), generator=generator, dtype=torch.int32)
    positions = None
    if listed:
        scores = torch.rand(6, 32000, generator=generator)
        positions = select_positions(scores, None, seq_lens, budget=listed, sinks=4, window=64, num_lookahead=444)
    counts = [min(n, listed or n) + 5 for n in seq_lens.tolist()]
    kv_indptr = torch.tensor([2, *counts]).cumsum(0).int()
    expected = torch.full((int(kv_indptr[-1]) + 8,), -1, dtype=torch.int32)
    kv_indices = expected.to(DEVICE)
    inputs = (positions, seq_lens, torch.arange(6) + 2, req_to_token, kv_indptr, 5)
    write_slots(*inputs, expected, max_len=32000)
    write_slots(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs), kv_indices, max_len=32000)
    assert torch.equal(kv_indices.cpu(), expected)


@pytest.mark.parametrize("k", [128, 512, 4096])
@pytest.mark.parametrize("bs, branches", [(1, 1), (8, 1), (67, 1), (8, 4)])
def test_draft_lists_equal_the_reference(k, bs, branches):
    generator = torch.Generator().manual_seed(k + bs)
    slots, width, new, forwards = bs + 3, 40000, 5, 4
    starts = torch.randint(1, width - new, (slots,), generator=generator)
    starts[:4] = torch.tensor([1, k, k + 1, width - new])
    lists = torch.stack([torch.randperm(max(k, n), generator=generator)[:k].sort().values for n in starts.tolist()])
    counts = torch.randint(1, k + 1, (slots,), generator=generator)
    pool = torch.randperm(slots, generator=generator)[:bs]
    ends = starts[pool] + torch.randint(new + 1, (bs,), generator=generator)
    own = torch.randint(10**6, (bs * branches, forwards + 1), generator=generator)[:, :forwards]
    req_to_token = torch.randint(10**6, (slots, width), generator=generator, dtype=torch.int32)
    kv_indptr = torch.empty((forwards, bs * branches + 1), dtype=torch.int32)
    kv_indices = torch.full((forwards, bs * branches * (k + 1 + new + forwards)), -1, dtype=torch.int32)
    inputs = (lists.int(), counts, starts, req_to_token, pool, ends, own)
    results = kv_indptr.to(DEVICE), kv_indices.to(DEVICE)
    write_draft_lists(*inputs, 1, kv_indptr, kv_indices, max_new=new)
    write_draft_lists(*(x.to(DEVICE) for x in inputs), 1, *results, max_new=new)
    assert torch.equal(results[0].cpu(), kv_indptr) and torch.equal(results[1].cpu(), kv_indices)


@pytest.mark.parametrize("g", [1, 5, 8, 64])
def test_mask_equals_the_reference(g):
    generator = torch.Generator().manual_seed(g)
    lengths = torch.tensor([512 + g, g, 0, 32000 + g, 100 + g])
    tree_mask = torch.rand(5 * g * g, generator=generator) < 0.5
    kv_indptr = torch.cat([lengths[:0].new_zeros(1), lengths.cumsum(0)]).int()
    mask_indptr = torch.cat([lengths[:0].new_zeros(1), ((lengths * g + 7) // 8).cumsum(0)]).int()
    expected = torch.full((int(mask_indptr[-1]) + 9,), 0xA5, dtype=torch.uint8)
    out = expected.to(DEVICE)
    pack_tree_mask(tree_mask, kv_indptr, mask_indptr, g, expected, max_kv_len=32000 + g)
    pack_tree_mask(
        tree_mask.to(DEVICE), kv_indptr.to(DEVICE), mask_indptr.to(DEVICE), g, out, max_kv_len=32000 + g
    )  # fmt: skip
    assert torch.equal(out.cpu(), expected)


def test_a_step_neither_synchronises_nor_misses_new_lengths_in_a_graph():
    """Score, select, write, pack: once without waiting for the device, then recorded and replayed at other lengths."""
    case = Case([3000, 2000, 600, 30], seed=7, **SHAPES["draft"])
    g, bs = 5, 4
    scores = torch.empty(bs, case.max_len, device=DEVICE)
    positions = torch.empty(bs, 512, dtype=torch.int32, device=DEVICE)
    kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
    mask_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
    kv_indices = torch.empty(bs * (512 + g), dtype=torch.int32, device=DEVICE)
    tree_mask = torch.ones(bs * g * g, dtype=torch.bool, device=DEVICE)
    packed = torch.empty(bs * (512 + g) * g, dtype=torch.uint8, device=DEVICE)
    buffers = [scores, positions, kv_indices, packed]

    def step():
        case.run(shift=1, out=scores)
        select_positions(scores, None, case.seq_lens, budget=512, sinks=4, window=64, num_lookahead=444, out=positions)
        counts = case.seq_lens.clamp(max=512) + g
        kv_indptr[1:] = counts.cumsum(0)
        mask_indptr[1:] = ((counts * g + 7) // 8).cumsum(0)
        write_slots(positions, case.seq_lens, case.req_pool_indices, case.req_to_token, kv_indptr, g, kv_indices)
        pack_tree_mask(tree_mask, kv_indptr, mask_indptr, g, packed, max_kv_len=512 + g)

    def results():
        for buffer in buffers:
            buffer.fill_(77)
        step()
        return [buffer.clone() for buffer in buffers]

    step()  # compiles, and makes the head tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seq_lens in ([3000, 2000, 600, 30], [30, 3000, 1, 2999], [0, 0, 512, 513]):
        case.seq_lens.copy_(torch.tensor(seq_lens))
        for keys in case.k_cache:
            keys.nan_to_num_(0.5)
        expected = results()
        for buffer in buffers:
            buffer.fill_(77)
        graph.replay()
        for actual, wanted in zip(buffers, expected):
            assert torch.equal(actual, wanted)


def test_no_length_of_a_context_compiles_a_kernel_after_the_warm_up(monkeypatch):
    budget, widest = 512, 70_000
    case = Case([widest, 600], seed=4, **SHAPES["draft"])

    def select(n):
        width, lengths = score_width(n), torch.tensor([n, min(n, 600)], device=DEVICE)
        scores = score_positions(
            case.q, case.k_cache, case.layer_of_head, case.kv_head_of_head, case.req_to_token, case.req_pool_indices,
            lengths, case.scale, max_len=width, shift=1, parts=3,
        )  # fmt: skip
        mixed = mix_scores(scores.unflatten(0, (3, 2)), torch.ones(4, 3, device=DEVICE)).flatten(0, 1)
        select_positions(mixed, None, lengths.repeat(4), budget=budget, sinks=4, window=64, num_lookahead=444)

    for n in warm_up_lengths(budget, case.req_to_token):
        select(n)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **said: compiled.append(said["repr"]))
    for n in (513, 600, 4000, 4096, 8192, 8193, 16_000, 20_000, 32_768, 33_000, 50_000, 65_536, 65_537, widest):
        select(n)
    assert not compiled
