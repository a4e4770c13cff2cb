"""Who chose each listed position."""

from __future__ import annotations

import torch

from dustin_kernels import select_positions
from dustin_sglang.selection.policies import Budget

# One character a position, in the order in which a legend names them.
PROTECTED, LOOKAHEAD, BOTH, REST, UNLISTED = "plbr."


def sources(
    budget: Budget, positions: torch.Tensor, lookahead: torch.Tensor | None, history: torch.Tensor | None, n: int
) -> str:
    """Say for each position of a context whether it is listed, and by whom.

    Parameters
    ----------
    budget
        As the policy divides it.
    positions
        int ``[k]``, the list of a context longer than k.
    lookahead, history
        float32 ``[n]``, the scores that the policy used.
    n
        Committed length.

    Returns
    -------
    str
        n characters: `UNLISTED`; `PROTECTED`; `LOOKAHEAD`, among the best m by lookahead; `BOTH`, likewise and also
        among the positions that history would have filled its share with alone; or `REST`, what filled the list.
    """
    listed = positions.tolist()
    ahead = _best(budget, lookahead, budget.lookahead, n)
    back = _best(budget, history, budget.left, n) if budget.rest == "history" else set()
    result = [UNLISTED] * n
    for position in listed:
        if position < budget.sinks or position >= n - budget.window:
            result[position] = PROTECTED
        elif position in ahead:
            result[position] = BOTH if position in back else LOOKAHEAD
        else:
            result[position] = REST
    return "".join(result)


def _best(budget: Budget, scores: torch.Tensor | None, count: int, n: int) -> set[int]:
    """The `count` best unprotected positions by these scores, ties broken as in a selection."""
    if scores is None or count == 0:
        return set()
    total = budget.protected + count
    lengths = torch.tensor([n], device=scores.device)
    chosen = select_positions(
        scores.unsqueeze(0), None, lengths, budget=total, sinks=budget.sinks, window=budget.window, num_lookahead=count
    )
    return {position for position in chosen[0].tolist() if budget.sinks <= position < n - budget.window}
