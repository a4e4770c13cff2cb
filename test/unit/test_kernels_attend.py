"""attend_slots: the kernel (interpreted) and its reference against a float64 computation, row by row."""

import math
import os

import numpy as np
import pytest
import torch

from dustin_kernels import attend, attend_slots
from dustin_kernels.parts import part_counters

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
]
CAUSAL, TREE = "causal", "tree"


class Case:
    """Random inputs; every slot that no list holds is NaN in both pools."""

    def __init__(
        self, kv_lens, *, rows=3, heads=4, kv_heads=2, head_dim=16, mask=CAUSAL, dtype=torch.float32, device="cpu",
        seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        bs, self.rows, self.scale = len(kv_lens), rows, head_dim**-0.5
        self.kv_indptr = torch.tensor([0, *np.cumsum(kv_lens)], dtype=torch.int32)
        num_slots = int(self.kv_indptr[-1]) + 40
        self.kv_indices = torch.randperm(num_slots, generator=generator)[: num_slots - 40].int()
        self.q = torch.randn(bs * rows, heads, head_dim, generator=generator).to(dtype)
        self.k_cache, self.v_cache = torch.randn(2, num_slots, kv_heads, head_dim, generator=generator).to(dtype)
        unlisted = torch.ones(num_slots, dtype=torch.bool)
        unlisted[self.kv_indices.long()] = False
        self.k_cache[unlisted] = self.v_cache[unlisted] = math.nan
        self.tree_mask, self.max_kv_len = None, max(kv_lens, default=0)
        if mask == TREE:
            tree = torch.rand(bs, rows, rows, generator=generator) < 0.5
            self.tree_mask = (tree.tril() | torch.eye(rows, dtype=torch.bool)).flatten()
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))

    def run(self, backend, out=None, requests=None):
        rows = slice(None) if requests is None else slice(0, requests * self.rows)
        tree = self.tree_mask
        if requests is not None and tree is not None:
            tree = tree[: requests * self.rows**2]
        indptr = self.kv_indptr if requests is None else self.kv_indptr[: requests + 1]
        return attend_slots(
            self.q[rows], self.k_cache, self.v_cache, indptr, self.kv_indices, self.rows, self.scale,
            max_kv_len=self.max_kv_len, tree_mask=tree, out=out, backend=backend,
        )  # fmt: skip

    def expected(self):
        """float64, one row and head at a time."""
        q, k, v = (x.double().cpu().numpy() for x in (self.q, self.k_cache, self.v_cache))
        group = q.shape[1] // k.shape[1]
        result = np.zeros(q.shape)
        indptr, indices = self.kv_indptr.tolist(), self.kv_indices.cpu().numpy()
        for b in range(len(indptr) - 1):
            slots = indices[indptr[b] : indptr[b + 1]]
            if len(slots) < self.rows:
                continue
            for r in range(self.rows):
                seen = np.arange(len(slots)) <= len(slots) - self.rows + r
                if self.tree_mask is not None:
                    seen[len(slots) - self.rows :] = self.tree_mask.view(-1, self.rows, self.rows)[b, r].cpu().numpy()
                for h in range(q.shape[1]):
                    own = slots[seen]
                    logits = k[own, h // group] @ q[b * self.rows + r, h] * self.scale
                    weights = np.exp(logits - logits.max())
                    result[b * self.rows + r, h] = weights @ v[own, h // group] / weights.sum()
        return torch.from_numpy(result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [CAUSAL, TREE])
@pytest.mark.parametrize(
    "shape",
    [
        dict(rows=1, heads=7, kv_heads=1),
        dict(rows=5, heads=4, kv_heads=4),
        dict(rows=5, heads=16, kv_heads=2, head_dim=32),
        dict(rows=2, heads=2, kv_heads=1, head_dim=20),
        dict(rows=9, heads=3, kv_heads=1),
    ],
    ids=["one row, GQA 7", "MHA", "80 rows a KV head", "odd head_dim", "nine rows"],
)
def test_result_is_softmax_attention_over_the_list(backend, mask, shape):
    case = Case([67, shape["rows"], 130, 16], mask=mask, **shape)
    torch.testing.assert_close(case.run(backend).double(), case.expected(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_has_as_many_tokens_as_an_int64_has_bits(backend):
    case = Case([70, 64], rows=64, heads=2, kv_heads=1, mask=TREE)
    torch.testing.assert_close(case.run(backend).double(), case.expected(), atol=2e-6, rtol=2e-6)
    with pytest.raises(ValueError, match="rows is 65; with a tree mask it must be at most 64"):
        Case([65], rows=65, mask=TREE).run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_sixteen_bit_inputs_agree_to_their_accuracy(backend, dtype, tolerance):
    if backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 bits as integers; test/gpu runs this")
    case = Case([300, 40], rows=5, heads=8, kv_heads=2, head_dim=64, dtype=dtype)
    torch.testing.assert_close(case.run(backend).double(), case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed_two_slots(backend):
    """One row, keys orthogonal and along the query: weights 1 / (1 + e) and e / (1 + e)."""
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 1.0
    k_cache, v_cache = torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    k_cache[2, 0, 0] = 1.0
    v_cache[0, 0, 1], v_cache[2, 0, 2] = 10.0, 20.0
    indptr, indices = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    out = attend_slots(q, k_cache, v_cache, indptr, indices, 1, 1.0, max_kv_len=2, backend=backend)
    assert out[0, 0, 1].item() == pytest.approx(10 / (1 + math.e))
    assert out[0, 0, 2].item() == pytest.approx(20 * math.e / (1 + math.e))
    assert out[0, 0, 3:].abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_is_overwritten_everywhere_and_short_lists_give_zeros(backend):
    case = Case([20, 2, 0, 9], rows=3)
    out = torch.full_like(case.q, math.nan)
    case.run(backend, out=out)
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-6, rtol=2e-6)
    assert (out[3:9] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_pools_and_queries(backend):
    """Pools that interleave K and V, and queries cut out of a fused projection."""
    case = Case([50, 33], rows=2, heads=4, kv_heads=2)
    want = case.expected()
    both = torch.stack([case.k_cache, case.v_cache], dim=2)
    case.k_cache, case.v_cache = both[:, :, 0], both[:, :, 1]
    case.q = torch.cat([case.q, torch.full_like(case.q, math.nan)], dim=1)[:, :4]
    torch.testing.assert_close(case.run(backend).double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("slots_per_part", [112, 64, 48, 16])
@pytest.mark.parametrize("tile", [16, 32])
def test_parts_merge_to_the_whole(tile, slots_per_part):
    """However a list falls into parts, also where one holds nothing or only tokens that a row must not see."""
    case = Case([111, 5, 64, 3], rows=5, heads=8, kv_heads=2, mask=CAUSAL)
    out = torch.full_like(case.q, math.nan)
    shape = attend._Shape(tile, 16, -(-112 // slots_per_part), slots_per_part, 2)
    attend._launch(
        case.q, case.k_cache, case.v_cache, case.kv_indptr, case.kv_indices, None, out, 4, 5, 2, case.scale, 111, shape
    )  # fmt: skip
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-6, rtol=2e-6)
    assert (part_counters(out.device, 1) == 0).all()


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("m", "pairs", "max_kv_len", "expected"),
    [
        (40, 16 * 8, 517, attend._Shape(64, 32, 1, 544, 5)),
        (20, 8 * 8, 517, attend._Shape(32, 64, 3, 192, 3)),
        (40, 8, 517, attend._Shape(16, 128, 5, 128, 2)),
        (7, 8 * 2, 520, attend._Shape(16, 128, 5, 128, 2)),
        (40, 1000, 517, attend._Shape(64, 32, 1, 544, 5)),
    ],
    ids=["72B, bs 16", "8B, bs 8", "72B, bs 1", "0.5B draft, bs 8", "more than the GPU holds"],
)
def test_launch_shapes_of_the_sweep(m, pairs, max_kv_len, expected):
    assert attend._shape(m, pairs, max_kv_len, 256, 2, 132) == expected


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("key_bytes", [32, 128, 256, 512, 1024])
@pytest.mark.parametrize("max_kv_len", [1, 16, 517, 40000])
@pytest.mark.parametrize("pairs", [1, 40, 5000])
def test_launch_shapes_cover_the_list_and_fit_into_shared_memory(key_bytes, max_kv_len, pairs):
    for m in (1, 20, 200):
        shape = attend._shape(m, pairs, max_kv_len, key_bytes, 4 if key_bytes == 1024 else 2, 132)
        assert shape.parts * shape.slots_per_part >= max_kv_len > (shape.parts - 1) * shape.slots_per_part
        assert shape.slots_per_part % shape.block == 0 and shape.block >= 16
        assert shape.stages * shape.block * 2 * key_bytes <= 200 * 1024


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rows=0), "rows is 0"),
        (dict(kv_indptr=torch.zeros(3, dtype=torch.int64)), "kv_indptr is torch.int64"),
        (dict(kv_indptr=torch.zeros(2, dtype=torch.int32)), "q has 6 rows; it must have 1 \\* 3"),
        (dict(k_cache=torch.zeros(9, 3, 16)), "v_cache has shape"),
        (dict(q=torch.zeros(6, 3, 16)), "q has 3 heads; it must be a multiple of the 2 KV heads"),
        (dict(max_kv_len=-1), "max_kv_len is -1"),
        (dict(tree_mask=torch.ones(3, dtype=torch.bool)), "tree_mask has shape"),
        (dict(out=torch.zeros(6, 4, 8)), "out has shape"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    case = Case([12, 10], rows=3)
    arguments = dict(
        q=case.q, k_cache=case.k_cache, v_cache=case.v_cache, kv_indptr=case.kv_indptr, kv_indices=case.kv_indices,
        rows=3, sm_scale=1.0, max_kv_len=12,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        attend_slots(**(arguments | change))
