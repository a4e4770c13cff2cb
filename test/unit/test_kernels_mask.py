"""pack_tree_mask: against numpy.packbits of the whole boolean mask."""

import os

import numpy as np
import pytest
import torch

from dustin_kernels import mask, pack_tree_mask

BACKENDS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    ),
]
POISON = 0xA5


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    # two drafts after one listed position: rows 1 1 0 and 1 1 1, then two padding bits
    tree_mask = torch.tensor([True, False, True, True])
    out = torch.full((3,), POISON, dtype=torch.uint8)
    indptr = torch.tensor([5, 8], dtype=torch.int32)
    pack_tree_mask(tree_mask, indptr, torch.tensor([1, 2], dtype=torch.int32), 2, out, max_kv_len=3, backend=backend)
    assert out.tolist() == [POISON, 0b00111011, POISON]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("g", [1, 2, 3, 8, 13])
def test_against_packbits(backend, g, monkeypatch):
    monkeypatch.setattr(mask, "_BLOCK", 16)
    rng = np.random.default_rng(g)
    lengths = [g, g + 1, g + 7, 0, g + 8, g + 127, g + 64, 0]
    trees = rng.random((len(lengths), g, g)) < 0.5
    starts, packed = [3], []
    for tree, length in zip(trees, lengths):
        full = np.concatenate([np.ones((g, length - g), bool), tree], axis=1) if length else np.zeros((g, 0), bool)
        packed.append(np.packbits(full.reshape(-1), bitorder="little"))
        starts.append(starts[-1] + len(packed[-1]))
    out = torch.full((starts[-1] + 4,), POISON, dtype=torch.uint8)
    pack_tree_mask(
        torch.from_numpy(trees).flatten(), torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        torch.tensor(starts, dtype=torch.int32), g, out, max_kv_len=max(lengths) + 5, backend=backend,
    )  # fmt: skip
    assert out[3:-4].tolist() == np.concatenate(packed).tolist()
    assert (out[:3] == POISON).all() and (out[-4:] == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_room_between_requests_is_untouched(backend):
    out = torch.full((8,), POISON, dtype=torch.uint8)
    pack_tree_mask(
        torch.ones(2, dtype=torch.bool), torch.tensor([0, 3, 12], dtype=torch.int32),
        torch.tensor([0, 4], dtype=torch.int32), 1, out, max_kv_len=9, backend=backend,
    )  # fmt: skip
    assert out.tolist() == [0b111, POISON, POISON, POISON, 0xFF, 0b1, POISON, POISON]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tree_mask=torch.ones(7, dtype=torch.bool)), r"tree_mask has shape \(7,\); it must be \[8\]"),
        (dict(tree_mask=torch.ones(8)), "tree_mask is torch.float32"),
        (dict(mask_indptr=torch.zeros(5, dtype=torch.int32)), "mask_indptr has 5 entries; it must have 2 or 3"),
        (dict(num_draft_tokens=0), "num_draft_tokens is 0"),
        (dict(out=torch.zeros(9, dtype=torch.bool)), "out is torch.bool"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(
        tree_mask=torch.ones(8, dtype=torch.bool), kv_indptr=torch.zeros(3, dtype=torch.int32),
        mask_indptr=torch.zeros(3, dtype=torch.int32), num_draft_tokens=2, out=torch.zeros(9, dtype=torch.uint8),
        max_kv_len=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        pack_tree_mask(**{**arguments, **change})
