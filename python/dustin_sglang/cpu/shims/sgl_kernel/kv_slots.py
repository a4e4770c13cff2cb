"""Operators that read and write ``req_to_token`` (which KV slot holds which position of which request) and KV rows.

``req_to_token`` is int32 ``[max_requests, pool_len]`` throughout; ``pool_len`` arguments repeat its width because the
compiled operators take raw pointers, and are not needed here.
"""

import ctypes

import torch


def _ragged_positions(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row number and position of every element of the ranges ``[start_i, end_i)``, concatenated.

    Parameters
    ----------
    start, end : Tensor, int ``[bs]``

    Returns
    -------
    rows, positions : Tensor, int64 ``[sum(end - start)]``
    """
    lengths = (end - start).long()
    rows = torch.repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    positions = torch.arange(rows.numel()) - before[rows] + start.long()[rows]
    return rows, positions


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Record freshly allocated slots: ``req_to_token[r_i, start_i:end_i] = next slots of out_cache_loc``, in place.

    Parameters
    ----------
    req_pool_indices, start_offset, end_offset : Tensor, int ``[bs]``
    req_to_token : Tensor, int32 ``[max_requests, pool_len]``, written
    out_cache_loc : Tensor, int64, at least ``[sum(end - start)]``
    """
    rows, positions = _ragged_positions(start_offset, end_offset)
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[rows], positions] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read slots back, one request after the other: the inverse of `assign_req_to_token_pool_cpu`.

    ``out_cache_loc`` (int64) is written in place and may be longer than ``sum(end - start)``; its tail is left alone.
    """
    rows, positions = _ragged_positions(start_offset, end_offset)
    slots = req_to_token[req_pool_indices.long()[rows], positions]
    out_cache_loc[: rows.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Slots that a round of drafting writes: the ``topk * steps`` ones after the committed tokens of each request.

    Parameters
    ----------
    req_pool_indices, seq_lens : Tensor, int ``[bs]``
    out_cache_loc : Tensor, int64 ``[bs * topk * steps]``, written; branch t of request b owns ``steps`` neighbours
    """
    offsets = torch.arange(topk * speculative_num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], seq_lens.long()[:, None] + offsets]
    out_cache_loc.copy_(slots.reshape(-1))


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A ``req_to_token`` with one row a draft branch: the committed slots, then the branch's own draft slots.

    Returns
    -------
    Tensor, int32 ``[bs * topk, pool_len]``
        Row ``b * topk + t``; columns past ``seq_len + num_steps`` are not meaningful.
    """
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    lengths = seq_lens.long().repeat_interleave(topk)[:, None]
    branch = torch.arange(rows.shape[0])[:, None] % topk
    steps = torch.arange(num_steps)
    drafts = rows.gather(1, lengths + branch * num_steps + steps)
    return rows.scatter(1, lengths + steps, drafts)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows between slots in every buffer; sources are read before targets are written.

    Parameters
    ----------
    data_ptrs : Tensor, uint64 ``[buffers]``
        Addresses of the K and V buffers of all layers.
    strides : Tensor, int64 ``[buffers]``
        Bytes a slot.
    tgt_loc, src_loc : Tensor, int64 ``[n]``
    """
    if tgt_loc.numel() == 0:
        return
    slots = int(max(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        rows[tgt_loc] = rows[src_loc]
