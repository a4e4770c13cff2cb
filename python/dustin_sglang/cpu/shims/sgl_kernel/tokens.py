"""Operators on the flat token arrays that surround a verification."""

import torch


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request (the one that the target itself produced).

    Parameters
    ----------
    accept_tokens : Tensor, int32 ``[bs, accept_stride]`` or flat
    accept_lens : Tensor, int32 ``[bs]``
        Accepted tokens, the bonus token included, so at least 1.
    bonus_tokens : Tensor, int32 ``[bs]``, written
    """
    last = accept_lens.long()[:, None] - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1, accept_stride).gather(1, last)[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Slots of the accepted rows, packed to the front; ``-1`` entries of ``accept_index`` are skipped.

    Parameters
    ----------
    accept_index : Tensor, int32, any shape
        Row numbers into ``out_cache_loc``, or -1.
    out_cache_loc : Tensor, int64 ``[bs * num_draft_tokens]``
    accept_out_cache_loc : Tensor, int64, at least as long as ``accept_index``, written; its tail is left alone
    """
    flat = accept_index.reshape(-1)
    slots = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and write its next token, in place.

    Parameters
    ----------
    input_ids : Tensor, int64 ``[tokens]``, written
    extend_start_loc, extend_seq_lens : Tensor, int ``[bs]``
    topk_index : Tensor, int64 ``[bs]`` or ``[bs, 1]``
        The next token of each request.
    select_index : Tensor, int64 ``[bs]``, optional
        Rows (into ``input_ids``) that take the next token; by default each request's last row.
    """
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    next_tokens = topk_index.reshape(-1)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        row = start + length - 1 if select_index is None else int(select_index[i])
        input_ids[row] = next_tokens[i]
