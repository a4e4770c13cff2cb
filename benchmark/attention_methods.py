"""Verification attention by each method: for a workload, the calls of a step, a layer each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from pools import Workload
from selection_chain import SINKS, WINDOW, SelectionChain
from timing import Call
from torch import Tensor

from dustin_kernels import attend_slots, write_slots
from dustin_sglang.selection.layer_groups import LayerGroups

MAX_LISTS = 16  # different lists of positions, where there are fewer pools than layers
_WORKSPACE_BYTES = 384 * 2**20  # SGLang's default for FlashInfer


class DoesNotFit(Exception):
    """A method needs more memory than there is."""


@dataclass(frozen=True)
class Step:
    """What one verification step launches.

    Attributes
    ----------
    calls
        One a layer; the selection comes first, where there is one.
    out
        Output of every layer's attention, [batch * g, heads, head_dim].
    lists
        Different lists of positions among the layers.
    """

    calls: list[Call]
    out: Tensor
    lists: int


def attend_ours(work: Workload, kv_indices: Tensor, listed: int, out: Tensor) -> Callable[[int], Call]:
    """Our verification kernel over lists of `listed` positions and the own tokens."""
    kv_len = listed + work.cell.g
    kv_indptr = work.indptr(kv_len)

    def layer(pool: int) -> Call:
        return lambda: attend_slots(
            work.q, work.keys[pool], work.values[pool], kv_indptr, kv_indices, work.cell.g, work.sm_scale,
            max_kv_len=kv_len, out=out,
        )  # fmt: skip

    return layer


@lru_cache(maxsize=1)
def _workspace(device: str) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def attend_flashinfer(work: Workload, kv_indices: Tensor, listed: int, out: Tensor) -> Callable[[int], Call]:
    """FlashInfer's fa2 paged prefill at page size 1, as SGLang's backend drives it in a CUDA graph."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    cell, kv_len = work.cell, listed + work.cell.g
    qo_indptr, kv_indptr = work.indptr(cell.g), work.indptr(kv_len)
    last_page_len = torch.ones(cell.batch, dtype=torch.int32, device=work.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        _workspace(work.device),
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=torch.empty_like(qo_indptr),
        paged_kv_indptr_buf=torch.empty_like(kv_indptr),
        paged_kv_indices_buf=kv_indices,
        paged_kv_last_page_len_buf=torch.empty_like(last_page_len),
    )
    wrapper.plan(
        qo_indptr.cpu(),
        kv_indptr.cpu(),
        kv_indices,
        last_page_len.cpu(),
        cell.target.heads,
        cell.target.kv_heads,
        cell.target.head_dim,
        1,
        causal=True,
        sm_scale=work.sm_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda pool: lambda: wrapper.run(work.q, (work.keys[pool], work.values[pool]), out=out)


def attend_triton(work: Workload, kv_indices: Tensor, listed: int, out: Tensor) -> Callable[[int], Call]:
    """SGLang's Triton extend attention, which its Triton backend verifies with: prefix by slots, own tokens beside."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    cell = work.cell
    lists = kv_indices.view(cell.batch, listed + cell.g)
    prefix = lists[:, :listed].flatten().long()
    own = lists[:, listed:].flatten().long()
    own_keys, own_values = work.keys[0][own], work.values[0][own]
    mask = torch.ones(cell.batch, cell.g, listed + cell.g, dtype=torch.bool, device=work.device)
    mask[:, :, listed:] = mask[:, :, listed:].tril()
    mask = mask.flatten()
    mask_indptr = work.indptr(cell.g * (listed + cell.g)).long()
    qo_indptr, kv_indptr = work.indptr(cell.g), work.indptr(listed)

    def layer(pool: int) -> Call:
        return lambda: extend_attention_fwd(
            work.q, own_keys, own_values, out, work.keys[pool], work.values[pool],
            qo_indptr, kv_indptr, prefix, mask, True, mask_indptr, cell.g, 1.0, 1.0, work.sm_scale,
        )  # fmt: skip

    return layer


def attend_paper_like(work: Workload, kv_indices: Tensor, listed: int, out: Tensor) -> Callable[[int], Call]:
    """Eager attention over a contiguous cache whose KV heads are repeated for every query head.

    That is what the paper's code builds on. Its cache is taken to lie contiguous, so nothing is gathered.
    """
    cell = work.cell
    target, kv_len = cell.target, listed + cell.g
    _require(work, 2 * cell.batch * target.heads * kv_len * (2 * target.head_dim + 7 * cell.g))
    hidden = torch.ones(cell.g, kv_len, dtype=torch.bool, device=work.device).triu(listed + 1)
    bias = torch.zeros(cell.g, kv_len, dtype=work.q.dtype, device=work.device).masked_fill(hidden, float("-inf"))
    q = work.q.view(cell.batch, cell.g, target.heads, target.head_dim).transpose(1, 2)
    group = target.heads // target.kv_heads

    def layer(pool: int) -> Call:
        caches = (work.keys[pool], work.values[pool])

        def call() -> None:
            shape = (cell.batch, kv_len, target.kv_heads, target.head_dim)
            keys, values = (cache.view(shape).transpose(1, 2).repeat_interleave(group, 1) for cache in caches)
            logits = q @ keys.transpose(2, 3) * work.sm_scale + bias
            weights = torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)
            out.view(cell.batch, cell.g, target.heads, target.head_dim).copy_((weights @ values).transpose(1, 2))

        return call

    return layer


def _require(work: Workload, num_bytes: int) -> None:
    if work.device == "cpu":
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if num_bytes > free:
        raise DoesNotFit(f"needs {num_bytes / 2**30:.0f} GiB beside the pools; {free / 2**30:.0f} GiB are free")


_ATTEND: dict[str, Callable[[Workload, Tensor, int, Tensor], Callable[[int], Call]]] = {
    "flashinfer": attend_flashinfer,
    "ours": attend_ours,
    "triton": attend_triton,
    "paper-like": attend_paper_like,
}
DENSE = tuple(_ATTEND)
SPARSE = ("flashinfer-sparse", "ours-sparse")
SELECTED = ("flashinfer-sparse+selection", "ours-sparse+selection")


def dense_step(method: str, work: Workload) -> Step:
    """A step whose layers read the whole context."""
    out = torch.empty_like(work.q)
    attend = _ATTEND[method](work, work.req_to_token.flatten(), work.cell.context, out)
    pools = len(work.keys)
    return Step([attend(layer % pools) for layer in range(work.cell.target.layers)], out, 1)


def sparse_step(method: str, work: Workload, k: int) -> Step:
    """A step whose layers read lists that are there already.

    Where there are fewer pools than layers, each further round through them takes another list, so that no layer finds
    another's KV in the L2.
    """
    out = torch.empty_like(work.q)
    layers, pools = work.cell.target.layers, len(work.keys)
    lists = min(MAX_LISTS, -(-layers // pools))
    attend = [
        _ATTEND[method.removesuffix("-sparse")](work, random_list(work, k, seed), k, out) for seed in range(lists)
    ]
    return Step([attend[layer // pools % lists](layer % pools) for layer in range(layers)], out, lists)


def selected_step(method: str, work: Workload, k: int, lookahead: str, groups: int = 1) -> Step:
    """A step that selects and whose layers read the list of their group that came out."""
    out = torch.empty_like(work.q)
    kv_indices = random_lists(work, k, groups)
    chain = SelectionChain(work, lookahead, k, kv_indices)
    attend = [_ATTEND[method.removesuffix("-sparse+selection")](work, own, k, out) for own in kv_indices]
    pools, layers = len(work.keys), work.cell.target.layers
    of = LayerGroups(layers, groups).of
    return Step([chain, *(attend[of(layer)](layer % pools) for layer in range(layers))], out, groups)


def random_lists(work: Workload, k: int, groups: int) -> Tensor:
    """A random list for each group of layers, int32 [groups, batch * (k + g)]."""
    return torch.stack([random_list(work, k, seed) for seed in range(groups)])


def random_list(work: Workload, k: int, seed: int) -> Tensor:
    """Slots of k random positions a request, first and last ones among them, and of the own tokens.

    Returns
    -------
    Tensor
        int32 [batch * (k + g)].
    """
    cell = work.cell
    draw = torch.Generator(work.device).manual_seed(seed)
    weight = torch.rand(cell.batch, cell.context, device=work.device, generator=draw)
    weight[:, :SINKS] = weight[:, cell.context - WINDOW :] = 2.0
    positions = weight.topk(k).indices.sort().values.int()
    kv_indices = torch.empty(cell.batch * (k + cell.g), dtype=torch.int32, device=work.device)
    write_slots(
        positions, work.seq_lens, work.req_pool_indices, work.req_to_token, work.indptr(k + cell.g), cell.g, kv_indices
    )
    return kv_indices


def parts(work: Workload, k: int, lookahead: str, groups: int = 1) -> dict[str, Call]:
    """The whole selection of a step, and each part of it."""
    chain = SelectionChain(work, lookahead, k, random_lists(work, k, groups))
    chain()  # each part alone works on what the ones before it left
    return {
        "selection": chain,
        "score-lookahead": chain.score_lookahead,
        "score-history": chain.score_history,
        "select": chain.select,
        "write-slots": chain.write,
    }
