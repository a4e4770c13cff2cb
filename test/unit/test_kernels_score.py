"""score_positions: the kernel (interpreted) and its reference against a float64 computation, head by head."""

import itertools
import math
import os

import numpy as np
import pytest
import torch

from dustin_kernels import score, score_positions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
]
# Few query rows and many dimensions: the kernel stores its logits. The other way round: it computes them twice.
SHAPES = {
    "stored": dict(rows=1, layer_of_head=(0, 0, 0), kv_head_of_head=(1, 1, 0), kv_heads=2, head_dim=64),
    "recomputed": dict(rows=5, layer_of_head=(1, 0, 1, 1, 1), kv_head_of_head=(0, 1, 0, 1, 0), kv_heads=2, head_dim=16),
}


BLOCK, CHUNK = 32, 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several blocks and chunks a context, also in short tests."""
    monkeypatch.setattr(score, "_CHUNK", CHUNK)
    monkeypatch.setattr(score, "_block_size", lambda head_dim, itemsize, tile: BLOCK)
    monkeypatch.setattr(score, "_SUM_BLOCK", BLOCK)


class Case:
    """Random inputs; the pools hold NaN wherever no position points."""

    def __init__(
        self, seq_lens, *, rows, layer_of_head, kv_head_of_head, kv_heads, head_dim, dtype=torch.float32, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        bs, heads, width = len(seq_lens), len(layer_of_head), max(*seq_lens, 1) + 3
        self.layer_of_head, self.kv_head_of_head = layer_of_head, kv_head_of_head
        self.q = torch.randn(bs, rows, heads, head_dim, generator=generator).to(dtype)
        self.seq_lens = torch.tensor(seq_lens)
        self.req_pool_indices = torch.randperm(bs + 2, generator=generator)[:bs]
        slots = torch.randperm((bs + 2) * width + 50, generator=generator)
        self.req_to_token = slots[: (bs + 2) * width].view(bs + 2, width).int()
        self.k_cache = [
            torch.randn(len(slots), kv_heads, head_dim, generator=generator).to(dtype)
            for _ in range(max(layer_of_head) + 1)
        ]
        used = torch.zeros(len(slots), dtype=torch.bool)
        for b, n in enumerate(seq_lens):
            used[self.req_to_token[self.req_pool_indices[b], :n].long()] = True
        for keys in self.k_cache:
            keys[~used] = math.nan
        self.scale = head_dim**-0.5

    def run(self, backend, *, max_len=None, shift=0, out=None, rows=slice(None), head_weights=None):
        return score_positions(
            self.q[rows], self.k_cache, self.layer_of_head, self.kv_head_of_head, self.req_to_token,
            self.req_pool_indices[rows], self.seq_lens[rows], self.scale,
            max_len=int(self.seq_lens.max()) if max_len is None else max_len, shift=shift, head_weights=head_weights,
            out=out, backend=backend,
        )  # fmt: skip

    def expected(self, max_len=None, shift=0, head_weights=None):
        """float64, one query at a time."""
        result = np.zeros((len(self.seq_lens), int(self.seq_lens.max()) if max_len is None else max_len))
        for b, n in enumerate(self.seq_lens.tolist()):
            slots = self.req_to_token[self.req_pool_indices[b], :n].long()
            for head, (layer, kv_head) in enumerate(zip(self.layer_of_head, self.kv_head_of_head)):
                keys = self.k_cache[layer][slots, kv_head].double().numpy()
                for query in self.q[b, :, head].double().numpy():
                    weights = np.exp(self.scale * (keys @ query))
                    for position in range(n - shift):
                        share = weights[position] / weights.sum()
                        result[b, position + shift] += share * (1 if head_weights is None else head_weights[head])
        return result


def assert_close(actual, expected):
    # float32 dot products and sums of at most 320 softmax weights: 2e-5 is some 100 roundings.
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=2e-5, atol=1e-7)


def tiny(backend, **options):
    """Logits 0, ln 2, 0 for the first row and 0, 0, 0 for the second; position j lies in slot 4 - j."""
    q = torch.zeros(1, 2, 1, 16)
    q[0, 0, 0, 3] = 2.0
    keys = torch.full((5, 1, 16), math.nan)
    keys[2:] = 0.0
    keys[3, 0, 3] = math.log(2.0)
    slots = torch.tensor([[0, 0, 0], [4, 3, 2]], dtype=torch.int32)
    return score_positions(
        q, [keys], (0,), (0,), slots, torch.tensor([1]), torch.tensor([3]), 0.5, backend=backend, **options
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    assert_close(tiny(backend, max_len=5), [[1 / 4 + 1 / 3, 1 / 2 + 1 / 3, 1 / 4 + 1 / 3, 0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_shift_moves_right_and_drops_the_end(backend):
    assert_close(tiny(backend, max_len=5, shift=1), [[0, 1 / 4 + 1 / 3, 1 / 2 + 1 / 3, 0, 0]])
    assert_close(tiny(backend, max_len=5, shift=3), [[0, 0, 0, 0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lengths_around_blocks_and_chunks(backend, shape, dtype):
    lengths = [1, BLOCK - 1, 0, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
    case = Case(lengths, dtype=dtype, seed=1, **SHAPES[shape])
    out = torch.full((len(lengths), max(lengths)), math.nan)
    assert case.run(backend, out=out) is out
    assert_close(out, case.expected())
    totals = SHAPES[shape]["rows"] * len(case.layer_of_head) * (case.seq_lens > 0).float()
    torch.testing.assert_close(out.sum(1), totals, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shift", [1, 130])
def test_shift_across_blocks(backend, shape, shift):
    case = Case([1, 129, 290], seed=2, **SHAPES[shape])
    out = torch.full((3, 300), math.nan)
    case.run(backend, max_len=300, shift=shift, out=out)
    assert_close(out, case.expected(300, shift))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_alone_and_in_a_batch_give_the_same_bits(backend, shape):
    case = Case([200, 5, 0, 131], seed=3, **SHAPES[shape])
    together = case.run(backend, max_len=411, shift=1)
    for b, n in enumerate(case.seq_lens.tolist()):
        alone = case.run(backend, max_len=max(n, 1), shift=1, rows=slice(b, b + 1))
        assert torch.equal(alone[0, :n], together[b, :n])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows, head_dim", [(1, 64), (5, 16)], ids=["stored", "recomputed"])
@pytest.mark.parametrize("shift", [0, 1])
def test_each_part_has_the_score_and_the_bits_of_a_call_of_its_own(backend, rows, head_dim, shift):
    """Three layers of two KV heads, read by three and one query heads each: a part a layer."""
    layers, kv_heads = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), (0, 1, 0, 0) * 3
    case = Case([CHUNK + 7, 3, 150, 0], rows=rows, layer_of_head=layers, kv_head_of_head=kv_heads, kv_heads=2,
                head_dim=head_dim)  # fmt: skip
    common = [case.req_to_token, case.req_pool_indices, case.seq_lens, case.scale]
    options = dict(max_len=160, shift=shift, backend=backend)
    out = torch.full((12, 176), math.nan)[:, :160]
    together = score_positions(case.q, case.k_cache, layers, kv_heads, *common, parts=3, out=out, **options)
    assert together is out
    for part, scores in enumerate(together.unflatten(0, (3, 4))):
        own = slice(4 * part, 4 * part + 4)
        alone = score_positions(case.q[:, :, own], case.k_cache, layers[own], kv_heads[own], *common, **options)
        assert torch.equal(scores, alone)
    assert_close(together.unflatten(0, (3, 4)).sum(0), case.expected(160, shift))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weighted_heads(backend, shape):
    case = Case([257, 0, 40], seed=8, **SHAPES[shape])
    weights = tuple((head % 3) / 2 for head in range(len(case.layer_of_head)))
    assert_close(case.run(backend, shift=1, head_weights=weights), case.expected(shift=1, head_weights=weights))
    ones = (1.0,) * len(weights)
    assert torch.equal(case.run(backend, head_weights=ones), case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_do_not_matter(backend):
    case = Case([150], seed=4, **SHAPES["recomputed"])
    before = case.run(backend)
    order = torch.randperm(len(case.k_cache[0]), generator=torch.Generator().manual_seed(4))
    for keys in case.k_cache:
        keys[order] = keys.clone()
    case.req_to_token = order[case.req_to_token.long()].int()
    assert torch.equal(case.run(backend), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views(backend):
    """Pools that are halves of a fused K and V, rows of a wider table, and an output inside a larger buffer."""
    case = Case([40, 77], seed=5, **SHAPES["recomputed"])
    expected = case.expected()
    case.k_cache = [torch.cat([torch.full_like(keys, math.nan), keys], dim=1)[:, 2:] for keys in case.k_cache]
    case.req_to_token = torch.cat([case.req_to_token, case.req_to_token * 0 - 1], dim=1)[
        :, : case.req_to_token.shape[1]
    ]
    case.q = torch.cat([case.q, case.q * math.nan], dim=2)[:, :, : case.q.shape[2]]
    buffer = torch.full((2, 90), math.nan)
    case.run(backend, out=buffer[:, 5:82])
    assert_close(buffer[:, 5:82], expected)
    assert buffer[:, :5].isnan().all() and buffer[:, 82:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_of_one_kv_head(backend):
    case = Case([140], rows=5, layer_of_head=(0,) * 64, kv_head_of_head=(0,) * 64, kv_heads=1, head_dim=16, seed=6)
    assert_close(case.run(backend), case.expected())
    case = Case(
        [33], rows=5, layer_of_head=(0,) * 64, kv_head_of_head=(0,) * 64, kv_heads=1, head_dim=16, dtype=torch.float16
    )
    assert_close(case.run(backend), case.expected())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_head_dims(backend, head_dim):
    case = Case([70], rows=2, layer_of_head=(0, 0), kv_head_of_head=(0, 0), kv_heads=1, head_dim=head_dim, seed=7)
    assert_close(case.run(backend), case.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(backend):
    case = Case([200], seed=8, **SHAPES["stored"])
    case.scale = 3000.0
    result = case.run(backend)
    assert result.isfinite().all()
    torch.testing.assert_close(result.sum(1), torch.tensor([3.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int32_lengths_and_indices(backend):
    case = Case([3, 60], seed=9, **SHAPES["stored"])
    expected = case.expected()
    case.seq_lens, case.req_pool_indices = case.seq_lens.int(), case.req_pool_indices.int()
    assert_close(case.run(backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    case = Case([0, 0], seed=10, **SHAPES["stored"])
    assert torch.equal(case.run(backend, max_len=9), torch.zeros(2, 9))
    assert case.run(backend, max_len=0).shape == (2, 0)
    assert case.run(backend, max_len=9, rows=slice(0)).shape == (0, 9)


def test_shipped_blocks_fill_chunks_and_fit_into_shared_memory(monkeypatch):
    monkeypatch.undo()
    for head_dim, itemsize, tile in itertools.product((16, 32, 64, 128, 256), (2, 4), (16, 32, 64)):
        block = score._block_size(head_dim, itemsize, tile)
        assert score._CHUNK % block == 0 and 16 <= block and block * head_dim * itemsize <= 16384
        assert block % score._columns(tile, block, 4) == 0


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_second_call_copies_nothing_to_the_device(monkeypatch):
    case = Case([20], seed=11, **SHAPES["recomputed"])
    first = case.run("triton")
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("built a tensor from host data"))
    assert torch.equal(case.run("triton"), first)


def test_cpu_tensors_take_the_reference():
    case = Case([50], seed=12, **SHAPES["stored"])
    assert torch.equal(case.run("auto"), case.run("reference"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(2, 1, 3, 64, dtype=torch.float64)), "q is torch.float64"),
        (dict(q=torch.zeros(2, 3, 64)), r"q has shape \(2, 3, 64\)"),
        (dict(q=torch.zeros(2, 1, 3, 16)), r"k_cache\[0\] has shape"),
        (dict(k_cache=[]), "k_cache is empty"),
        (dict(k_cache=[torch.zeros(4, 2, 64, dtype=torch.float16)]), r"k_cache\[0\] is torch.float16"),
        (dict(k_cache=[torch.zeros(4, 64, 2).mT]), r"k_cache\[0\] has stride 2"),
        (dict(layer_of_head=(0, 0, 1)), r"layer_of_head is \(0, 0, 1\); its entries must be from 0 to 0"),
        (dict(kv_head_of_head=(0, 2, 1)), "kv_head_of_head is .* from 0 to 1"),
        (dict(kv_head_of_head=(0, 1)), "kv_head_of_head has 2 entries; q has 3 heads"),
        (dict(req_to_token=torch.zeros(4, 9)), "req_to_token is torch.float32"),
        (dict(seq_lens=torch.zeros(3, dtype=torch.int64)), r"seq_lens has shape \(3,\)"),
        (dict(max_len=-1), "max_len is -1"),
        (dict(shift=-1), "shift is -1"),
        (dict(parts=0), "parts is 0"),
        (dict(parts=3), "parts is 3; it must be at least 1 and divide the number of pairs"),
        (dict(head_weights=(1.0, 1.0)), r"head_weights is \(1.0, 1.0\); it must hold a finite"),
        (dict(head_weights=(1.0, -0.5, 1.0)), "head_weights is .* at least 0"),
        (dict(head_weights=(1.0, math.nan, 1.0)), "head_weights is .* finite"),
        (dict(out=torch.zeros(2, 4)), r"out has shape \(2, 4\); it must be \[2, 9\]"),
        (dict(backend="cuda"), "backend is 'cuda'"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(
        q=torch.zeros(2, 1, 3, 64), k_cache=[torch.zeros(4, 2, 64)], layer_of_head=(0, 0, 0), kv_head_of_head=(0, 1, 1),
        req_to_token=torch.zeros(4, 9, dtype=torch.int32), req_pool_indices=torch.zeros(2, dtype=torch.int64),
        seq_lens=torch.ones(2, dtype=torch.int64), sm_scale=1.0, max_len=9,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        score_positions(**{**arguments, **change})


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_kernel_refuses_odd_head_dims():
    case = Case([5], rows=1, layer_of_head=(0,), kv_head_of_head=(0,), kv_heads=1, head_dim=48)
    assert_close(case.run("reference"), case.expected())
    with pytest.raises(ValueError, match="head_dim is 48"):
        case.run("triton")
