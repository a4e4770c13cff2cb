"""Selection policies: each turns scores into one ascending list of positions a request.

Adding a policy is one class here with a `name`; `POLICIES` finds it. See CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dustin_kernels import select_positions


@dataclass(frozen=True)
class Budget:
    """How the k positions of a list are divided.

    Attributes
    ----------
    total
        k, positions listed for a request whose context is longer than k.
    sinks, window
        Protected first and last positions.
    lookahead
        m, positions chosen by lookahead; history fills what is left.
    """

    total: int
    sinks: int
    window: int
    lookahead: int

    @property
    def protected(self) -> int:
        """Positions that every list of k holds whatever their scores."""
        return self.sinks + self.window

    @property
    def history(self) -> int:
        """Positions that history fills."""
        return self.total - self.protected - self.lookahead


class Policy:
    """One way to choose. Subclasses set the class attributes and override what differs.

    Attributes
    ----------
    name
        Value of ``--dustin-policy``.
    uses_lookahead, uses_history
        Signals that must be scored for this policy; the others are not computed.
    dense
        Every position is listed whatever the budget.
    """

    name: ClassVar[str]
    uses_lookahead: ClassVar[bool] = False
    uses_history: ClassVar[bool] = False
    dense: ClassVar[bool] = False

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        """Divide `total` positions; `lookahead_share` is the share of the unprotected ones."""
        return Budget(total, sinks, window, 0)

    def select(
        self,
        budget: Budget,
        lookahead: torch.Tensor | None,
        history: torch.Tensor | None,
        seq_lens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        """List the positions that verification reads.

        Parameters
        ----------
        budget
            From `Policy.budget`.
        lookahead, history
            float32 ``[batch, max_len]``, or None when the policy does not use the signal.
        seq_lens
            int64 ``[batch]``, committed lengths.
        max_len
            The largest of them, known to the host.

        Returns
        -------
        torch.Tensor
            int32 ``[batch, budget.total]``: ascending unique positions, all of them when the context is not longer
            than the budget; -1 beyond.
        """
        return select_positions(
            lookahead,
            history,
            seq_lens,
            budget=budget.total,
            sinks=budget.sinks,
            window=budget.window,
            num_lookahead=budget.lookahead,
        )


class Hybrid(Policy):
    """The paper's rule: m by the draft's lookahead, the rest by the target's history."""

    name = "hybrid"
    uses_lookahead = True
    uses_history = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, round(lookahead_share * (total - sinks - window)))


class Lookahead(Policy):
    """The draft's queries alone."""

    name = "lookahead"
    uses_lookahead = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, total - sinks - window)


class History(Policy):
    """The target's last query alone."""

    name = "history"
    uses_history = True


class Streaming(Policy):
    """Sinks and a recent window (StreamingLLM's set): nothing is scored."""

    name = "streaming"

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, total - sinks, 0)

    def select(
        self,
        budget: Budget,
        lookahead: torch.Tensor | None,
        history: torch.Tensor | None,
        seq_lens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        rank = torch.arange(budget.total, device=seq_lens.device).unsqueeze(0)
        length = seq_lens.unsqueeze(1)
        skipped = torch.where(rank < budget.sinks, 0, (length - budget.total).clamp(min=0))
        return torch.where(rank < length, rank + skipped, -1).to(torch.int32)


class Random(Policy):
    """Pseudo-random positions beside the protected ones: the floor that a signal has to beat.

    A hash of position and length, not a generator: every rank must draw the same list without talking.
    """

    name = "random"

    def select(
        self,
        budget: Budget,
        lookahead: torch.Tensor | None,
        history: torch.Tensor | None,
        seq_lens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        position = torch.arange(max_len, device=seq_lens.device).unsqueeze(0)
        x = ((position + 1) * 0x9E3779B1) ^ (seq_lens.unsqueeze(1) * 0x85EBCA6B)
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        return super().select(budget, None, (x & 0xFFFFFF).to(torch.float32), seq_lens, max_len)


class Dense(Policy):
    """Every position: what SGLang's own verification reads, on our code path."""

    name = "dense"
    dense = True


def _subclasses(cls: type[Policy]) -> list[type[Policy]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


POLICIES: dict[str, Policy] = {c.name: c() for c in _subclasses(Policy) if hasattr(c, "name")}
