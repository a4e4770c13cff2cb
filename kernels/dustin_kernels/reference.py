"""Torch references of every kernel, the choice between the two, and the argument checks they share.

The references are what CPU tensors run on and what the kernels are compared with. They loop over requests and read
lengths on the host: on CUDA tensors (`backend="reference"`) that waits for the device, which is fine in a test and
nowhere else.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import triton
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]

_LARGEST_KEY = 0x7F800000  # the bits of +inf


def use_triton(backend: Backend, device: torch.device) -> bool:
    """Whether a call on `device` runs the Triton kernel; ValueError or RuntimeError if it was asked for and cannot."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(get_args(Backend))}")
    if backend == "triton" and device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise RuntimeError(f"backend='triton' needs CUDA tensors or TRITON_INTERPRET=1; these are on {device}")
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any size), dtype, device and rows without gaps."""
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(want not in (None, size) for want, size in zip(shape, sizes)):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {sizes}; it must be [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the other tensors are on {device}")
    if tensor.numel() and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")


def score_positions(
    q: Tensor,
    k_cache: Sequence[Tensor],
    layer_of_head: tuple[int, ...],
    kv_head_of_head: tuple[int, ...],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    max_len: int,
    shift: int = 0,
    parts: int = 1,
    head_weights: Sequence[float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Reference of `dustin_kernels.score_positions`."""
    weights = torch.tensor([1.0] * q.shape[2] if head_weights is None else head_weights, device=q.device)
    if out is None:
        out = torch.empty(parts * q.shape[0], max_len, dtype=torch.float32, device=q.device)
    out.zero_()
    groups: dict[tuple[int, int], list[int]] = {}
    for head, group in enumerate(zip(layer_of_head, kv_head_of_head)):
        groups.setdefault(group, []).append(head)
    limit = min(max_len, req_to_token.shape[1])
    for b, (pool_index, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        n = min(seq_len, limit)
        if n <= shift:
            continue
        slots = req_to_token[pool_index, :n].long()
        totals = torch.zeros(parts, n, dtype=torch.float32, device=q.device)
        for index, ((layer, kv_head), heads) in enumerate(sorted(groups.items())):
            keys = k_cache[layer][slots, kv_head].float()
            logits = q[b, :, heads].float().flatten(0, 1) @ keys.T * sm_scale
            shares = torch.softmax(logits, dim=-1) * weights[heads].repeat(q.shape[1]).unsqueeze(1)
            totals[index * parts // len(groups)] += shares.sum(0)
        out.unflatten(0, (parts, q.shape[0]))[:, b, shift:n] = totals[:, : n - shift]
    return out


def mix_scores(scores: Tensor, weights: Tensor) -> Tensor:
    """Reference of `dustin_kernels.mix_scores`."""
    total = torch.zeros(weights.shape[0], *scores.shape[1:], dtype=torch.float32, device=scores.device)
    for part, score in enumerate(scores):
        total += weights[:, part].view(-1, 1, 1) * score
    return total


def score_keys(scores: Tensor) -> Tensor:
    """int32 keys that order float32 scores as `select_positions` does: negative, -0 and NaN count as 0."""
    bits = scores.view(torch.int32)
    return bits.clamp(min=0).masked_fill(bits > _LARGEST_KEY, 0)


def select_positions(
    lookahead: Tensor | None,
    history: Tensor | None,
    seq_lens: Tensor,
    *,
    budget: int,
    sinks: int,
    window: int,
    num_lookahead: int,
    out: Tensor | None = None,
) -> Tensor:
    """Reference of `dustin_kernels.select_positions`."""
    device = seq_lens.device
    if out is None:
        out = torch.empty(seq_lens.shape[0], budget, dtype=torch.int32, device=device)
    out.fill_(-1)
    for b, seq_len in enumerate(seq_lens.tolist()):
        n = min(seq_len, *(scores.shape[1] for scores in (lookahead, history) if scores is not None), 2**31 - 1)
        if n <= budget:
            out[b, : max(n, 0)] = torch.arange(max(n, 0), device=device)
            continue
        keep = torch.zeros(n, dtype=torch.bool, device=device)
        keep[:sinks] = True
        keep[n - window :] = True
        for scores, count in ((lookahead, num_lookahead), (history, budget - sinks - window - num_lookahead)):
            candidates = (~keep).nonzero().squeeze(1)
            if scores is not None:
                order = torch.sort(score_keys(scores[b, candidates]), descending=True, stable=True).indices
                candidates = candidates[order]
            keep[candidates[:count]] = True
        out[b] = keep.nonzero().squeeze(1)
    return out


def write_slots(
    positions: Tensor | None,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    kv_indptr: Tensor,
    num_draft_tokens: int,
    kv_indices: Tensor,
    *,
    max_len: int | None = None,
) -> None:
    """Reference of `dustin_kernels.write_slots`."""
    listed = positions.shape[1] if positions is not None else max_len
    assert listed is not None
    starts = kv_indptr.tolist()
    for b, (pool_index, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        n = max(min(listed, seq_len, starts[b + 1] - starts[b] - num_draft_tokens), 0)
        if positions is None:
            prefix = torch.arange(n, device=seq_lens.device)
        else:
            prefix = positions[b, :n].long()
        drafts = torch.arange(seq_len, seq_len + num_draft_tokens, device=seq_lens.device)
        chosen = torch.cat([prefix, drafts])[: starts[b + 1] - starts[b]]
        kv_indices[starts[b] : starts[b] + chosen.numel()] = req_to_token[pool_index, chosen]


def write_draft_lists(
    lists: Tensor,
    counts: Tensor,
    starts: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    ends: Tensor,
    own: Tensor,
    own_first: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Reference of `dustin_kernels.write_draft_lists`."""
    bs, k = req_pool_indices.shape[0], lists.shape[1]
    last = req_to_token.shape[1] - 1
    contexts = []
    for slot, end in zip(req_pool_indices.tolist(), ends.tolist()):
        start, chosen = int(starts[slot]), lists[slot, : int(counts[slot])].long()
        listed = torch.arange(start - 1, device=lists.device) if start <= k else chosen[chosen > 0] - 1
        positions = torch.cat([listed, torch.arange(start - 1, end, device=lists.device)])
        contexts.append(req_to_token[slot, positions.clamp(max=last)])
    for forward in range(kv_indptr.shape[0]):
        rows = [
            torch.cat([contexts[row // (len(own) // bs)], slots[: own_first + forward].int()])
            for row, slots in enumerate(own)
        ]
        lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32)
        kv_indptr[forward] = lengths.cumsum(0)
        if rows:
            packed = torch.cat(rows)
            kv_indices[forward, : len(packed)] = packed


def pack_tree_mask(
    tree_mask: Tensor, kv_indptr: Tensor, mask_indptr: Tensor, num_draft_tokens: int, out: Tensor, *, max_kv_len: int
) -> None:
    """Reference of `dustin_kernels.pack_tree_mask`."""
    g = num_draft_tokens
    weights = 2 ** torch.arange(8, dtype=torch.int32, device=out.device)
    trees = tree_mask.view(-1, g, g)
    lengths = (kv_indptr[1:] - kv_indptr[:-1]).tolist()
    for b, (start, kv_len) in enumerate(zip(mask_indptr.tolist(), lengths)):
        if kv_len == 0:
            continue
        prefix = torch.ones(g, kv_len - g, dtype=torch.bool, device=out.device)
        bits = torch.cat([prefix, trees[b]], dim=1).flatten().int()
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        out[start : start + bits.shape[0]] = (bits * weights).sum(1).to(torch.uint8)


def attend_slots(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    rows: int,
    sm_scale: float,
    *,
    max_kv_len: int,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Reference of `dustin_kernels.attend_slots`."""
    if out is None:
        out = torch.empty_like(q)
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    starts = kv_indptr.tolist()
    for b in range(len(starts) - 1):
        own = slice(b * rows, (b + 1) * rows)
        slots = kv_indices[starts[b] : starts[b + 1]].long()
        n = slots.numel()
        if n < rows:
            out[own] = 0
            continue
        visible = torch.ones(rows, n, dtype=torch.bool, device=q.device)
        if tree_mask is None:
            visible[:, n - rows :].tril_()
        else:
            visible[:, n - rows :] = tree_mask.view(-1, rows, rows)[b]
        keys, values = k_cache[slots].float(), v_cache[slots].float()
        queries = q[own].float().view(rows, kv_heads, heads // kv_heads, head_dim)
        logits = torch.einsum("rhgd,nhd->hgrn", queries, keys) * sm_scale
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)
        out[own] = torch.einsum("hgrn,nhd->rhgd", weights, values).reshape(rows, heads, head_dim).to(out.dtype)
    return out
