"""Kernels of dustin-sglang: score, mix scores, select positions, write lists of slots, attend to them, pack masks.

Each operation is a Triton kernel beside a torch reference of the same signature (`dustin_kernels.reference`). CUDA
tensors take the kernel and CPU tensors the reference; `backend=` overrides that, and `TRITON_INTERPRET=1` lets the
kernels run on CPU tensors. Nothing here waits for the device or copies to it, except the head tables of the first
`score_positions` call.
"""

from dustin_kernels.attend import attend_slots
from dustin_kernels.draft_lists import write_draft_lists
from dustin_kernels.mask import pack_tree_mask
from dustin_kernels.mix import mix_scores
from dustin_kernels.reference import Backend
from dustin_kernels.score import score_positions
from dustin_kernels.select import select_positions
from dustin_kernels.slots import write_slots

__all__ = [
    "Backend",
    "attend_slots",
    "mix_scores",
    "pack_tree_mask",
    "score_positions",
    "select_positions",
    "write_draft_lists",
    "write_slots",
]
