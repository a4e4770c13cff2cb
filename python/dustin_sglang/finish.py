"""The end of an answer inside an accepted run that also crosses max_new_tokens.

SGLang asks for the length first, so a stop string, stop token or EOS in such a run is overlooked, and what follows it
comes out. Token by token, as without speculation, it would have ended the answer before the length did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stop_before_length(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Wrap `Req.update_finish_state`; runs that do not cross the limit are left to `original`.

    Parameters
    ----------
    req
        SGLang's ``Req``; its ``output_ids`` hold the run already.
    new_accepted_len : int
        Tokens of the run.
    """
    limit = req.sampling_params.max_new_tokens
    # The token at the limit ends the answer by its length in any case.
    beyond = len(req.output_ids) - (limit - 1)
    before = new_accepted_len - beyond
    if not req.finished() and not req.to_finish and beyond > 0 and before > 0 and _is_ours():
        tail = req.output_ids[-beyond:]
        del req.output_ids[-beyond:]
        stopped = req._check_str_based_finish(before) or req._check_token_based_finish(req.output_ids[-before:])
        req.output_ids.extend(tail)
        if stopped:
            return None
    return original(req, new_accepted_len)


def _is_ours() -> bool:
    from sglang.srt.runtime_context import get_server_args

    from dustin_sglang.algorithm import NAME

    return (get_server_args().speculative_algorithm or "").upper() == NAME
