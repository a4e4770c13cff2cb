"""Sampling in a verification on the CPU.

SGLang's `eagle_sample` takes the argmax on a CPU whatever the request asks for. Here one token is drawn from the target
distribution at every node, and the tree is followed down those tokens. That is target-only speculative sampling: on a
GPU a coin accepts each child with its target probability and, where none is accepted, the rest of the distribution is
drawn from, so in both cases the token after a node has exactly the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sample_verified(
    original: Callable[..., Sampled],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
) -> Sampled:
    """Wrap `eagle_sample`: greedy batches as before, others sampled.

    Returns
    -------
    predict : Tensor, int32 ``[batch * nodes]``
        The target's token at the accepted rows.
    accept_lens : Tensor, int32 ``[batch]``
        Accepted tokens, the bonus token included.
    accept_index : Tensor, int32 ``[batch, depth]``
        Rows of the accepted nodes, -1 behind them.
    """
    greedy = original(verify_input, batch, logits_output, grammar_mask)
    if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy or _acceptance_is_simulated():
        return greedy
    from sgl_kernel import verify_tree_greedy_cpu
    from sglang.srt.distributed import get_tp_group

    requests, nodes = len(batch.seq_lens), verify_input.draft_token_num
    # `original` has added penalties and bias to the logits and masked them by the grammar, in place.
    probs = target_probs(logits_output.next_token_logits, batch.sampling_info, nodes)
    drawn = torch.multinomial(probs, 1)
    if get_tp_group().world_size > 1:
        get_tp_group().broadcast(drawn, src=0)

    predict, accept_index = torch.zeros_like(greedy[0]), torch.full_like(greedy[2], -1)
    num_correct_drafts = torch.empty_like(greedy[1])
    verify_tree_greedy_cpu(
        predicts=predict,
        accept_index=accept_index,
        accept_token_num=num_correct_drafts,
        candidates=verify_input.draft_token.reshape(requests, nodes),
        retrive_index=verify_input.retrieve_index,
        retrive_next_token=verify_input.retrieve_next_token,
        retrive_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=drawn.view(requests, nodes),
    )
    return predict, num_correct_drafts + 1, accept_index


def target_probs(logits: torch.Tensor, sampling_info: Any, nodes: int) -> torch.Tensor:
    """Distribution of the token after every node: temperature, then top_k, then top_p, as SGLang's GPU verification.

    Parameters
    ----------
    logits : Tensor, float ``[batch * nodes, vocab]``
    sampling_info
        SGLang's ``SamplingBatchInfo``; greedy requests have a top_k of 1.
    nodes : int
        Rows a request.

    Returns
    -------
    Tensor, float32 ``[batch * nodes, vocab]``
        Each row sums to 1.
    """
    temperatures, top_ks, top_ps = (
        values.view(-1, 1).repeat_interleave(nodes, dim=0)
        for values in (sampling_info.temperatures, sampling_info.top_ks, sampling_info.top_ps)
    )
    # A grammar may leave a node no token, and a draft that it forbids is never reached: any token will do there.
    finite = torch.nan_to_num(logits.float() / temperatures, nan=torch.finfo(torch.float32).min)
    probs, tokens = torch.softmax(finite, dim=-1).sort(dim=-1, descending=True, stable=True)
    probs = probs.masked_fill(torch.arange(probs.shape[1]) >= top_ks, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs > top_ps, 0.0)
    return torch.zeros_like(probs).scatter_(1, tokens, probs / probs.sum(dim=-1, keepdim=True))


def _acceptance_is_simulated() -> bool:
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    return SIMULATE_ACC_LEN > 0
