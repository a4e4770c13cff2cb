"""A list chosen once, at the end of the prompt (SnapKV, arXiv 2404.14469), with one list for all layers."""

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import Budget, Policy


class SnapKV(Policy):
    """The prompt's best positions by its last query, fixed from the first selection on, and all that came later.

    Later tokens take the places of the prompt's least attended ones; once they exceed the budget, the newest stay.
    SnapKV itself votes with the queries of a window of the prompt and drops what loses; here one query is kept, and
    nothing is dropped.
    """

    name = "snapkv"
    uses_history = True

    def __init__(self) -> None:
        self._prompt: torch.Tensor | None = None  # int64 [slots]: length at the first selection, 0 before it
        self._positions = torch.empty(0)  # int64 [slots, budget]: the list of then
        self._priority = torch.empty(0)  # float32 [slots, budget], from 0.5 to 1, in the order of their scores

    @classmethod
    def why_not_groups(cls, count: int, mixed: bool = False) -> str | None:
        return "one list a request is kept, for all layers; use 1" if count > 1 else None

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, 0, rest="prompt")

    def prefilled(self, slots: torch.Tensor) -> None:
        if self._prompt is not None:
            self._prompt[slots] = 0

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        assert history is not None
        self._allocate(budget, context)
        assert self._prompt is not None
        slots, length = context.req_pool_indices, context.seq_lens
        # A context within the budget is listed whole; the list is fixed when there is something to leave out.
        fresh = (self._prompt[slots] == 0) & (length > budget.total)
        now = super().select(budget, None, history, context).long().clamp(min=0)
        self._prompt[slots] = torch.where(fresh, length, self._prompt[slots])
        self._positions[slots] = torch.where(fresh.unsqueeze(1), now, self._positions[slots])
        rank = history.gather(1, now).argsort(dim=1, descending=True, stable=True).argsort(1)
        priority = 1 - rank / (2 * budget.total)
        self._priority[slots] = torch.where(fresh.unsqueeze(1), priority, self._priority[slots])

        listed = self._positions[slots].clamp(max=context.max_len - 1)
        static = torch.zeros_like(history).scatter(1, listed, self._priority[slots])
        position = torch.arange(context.max_len, device=length.device)
        later = position >= self._prompt[slots].unsqueeze(1)
        return super().select(budget, None, torch.where(later, position + 1.0, static), context)

    def _allocate(self, budget: Budget, context: Context) -> None:
        if self._prompt is None or self._positions.shape[1] != budget.total:
            slots, device = context.req_to_token.shape[0], context.seq_lens.device
            self._prompt = torch.zeros(slots, dtype=torch.int64, device=device)
            self._positions = torch.zeros(slots, budget.total, dtype=torch.int64, device=device)
            self._priority = torch.zeros(slots, budget.total, device=device)
