"""Stand-in for SGLang's compiled ``sgl_kernel`` on machines without a GPU.

With ``SGLANG_USE_CPU_ENGINE=1`` SGLang imports its CPU operators from a package of this name, which PyPI does not
carry. The operators that the scheduler and speculative decoding call are here in plain torch, with the argument order
of SGLang's call sites; the Triton kernels beside those call sites define what each one does.

Two kinds of missing names must behave differently:

- ``*_cpu`` names are imported by SGLang without a guard, sometimes for features that a run never uses. They resolve to
  a function that raises when it is called.
- all other names (CUDA operators) are often imported inside ``try``, to find out whether they exist. They must stay
  absent, or SGLang would believe in a kernel that is not there.
"""

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel.kv_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.tokens import fill_accept_out_cache_loc_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu
from sgl_kernel.tree import (
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Resolve a name that this package does not implement (see the module docstring)."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"dustin-sglang's CPU stand-in for sgl_kernel has no operator {name!r}")

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not part of dustin-sglang's CPU stand-in; the SGLang feature that called it needs "
            "SGLang's compiled CPU operators"
        )

    missing.__name__ = name
    return missing
