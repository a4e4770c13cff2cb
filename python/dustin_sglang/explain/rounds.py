"""One request, decoded greedily in rounds as a server does, and the list that each round's verification would read.

A round drafts a chain of g - 1 tokens, chooses, and verifies g rows. Verification itself is dense here: the list is
what a sparse one would read at this point. Roles of slots and rows are those of `calibrate.windows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.mass import ListSize, listed_mass
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.explain.cached import CachedModel, Forward
from dustin_sglang.explain.sources import sources
from dustin_sglang.profile import ModelShape, Profile
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.page_bounds import PageBounds
from dustin_sglang.selection.policies import POLICIES
from dustin_sglang.selection.selector import Selector
from dustin_sglang.selection.signals import Signal
from dustin_sglang.selection.state import QueryStore


@dataclass(frozen=True)
class Round:
    """One verification.

    Attributes
    ----------
    length
        Committed tokens n.
    tokens
        Those that are verified, the last one that is known and then the draft's; behind them the target's own, which
        follows the accepted ones.
    accepted
        How many of the draft's tokens are the target's own.
    marks
        n characters from `sources.sources`.
    lookahead, history
        float32 ``[n]``, scores of the signals that the policy uses.
    captured_mass
        Of the list, by the dense verification's attention (`calibrate.mass`).
    """

    length: int
    tokens: list[int]
    accepted: int
    marks: str
    lookahead: torch.Tensor | None
    history: torch.Tensor | None
    captured_mass: float


@dataclass(frozen=True)
class Decoded:
    """A request: its tokens, prompt and answer, and its rounds."""

    ids: list[int]
    prompt_tokens: int
    rounds: list[Round]


class Request:
    """Decodes one request.

    Parameters
    ----------
    target, draft
        The models.
    profile
        The scoring heads.
    policy
        Name of a policy that chooses.
    size
        Size of a list.
    rows
        g, rows of a verification, at least 3.
    capacity
        Most tokens, those under verification included.
    layers
        Target layers that read the list, by whose attention it is judged; None for all.
    """

    def __init__(
        self,
        target: TracedModel,
        draft: TracedModel,
        profile: Profile,
        policy: str,
        size: ListSize,
        rows: int,
        capacity: int,
        layers: range | None = None,
    ) -> None:
        self._size, self._rows = size, rows
        self._policy = POLICIES[policy]()
        self.budget = self._policy.budget(size.budget, size.sinks, size.window, profile.lookahead_share)
        self._target = _Side(target, profile.history, capacity, shift=0, attended=layers)
        self._draft = _Side(draft, profile.lookahead, capacity, shift=1, steps=rows - 1)

    def decode(self, prompt: list[int], new_tokens: int, end: int | None, progress: Callable[[int], None]) -> Decoded:
        """Decode until the round in which `new_tokens` are reached, or until the token `end`.

        Parameters
        ----------
        prompt
            More tokens than a list holds.
        progress
            Called with the number of new tokens.

        Raises
        ------
        CalibrationError
            The answer ends with its first token, so that nothing is verified.
        """
        ids = [*prompt, self._target.prefill(prompt)]
        if ids[-1] == end:
            raise CalibrationError("the target has no answer to this prompt, so nothing is verified; add a --question")
        first = self._draft.prefill(ids[1:])
        self._policy.prefilled(torch.zeros(1, dtype=torch.int64))
        rounds: list[Round] = []
        while len(ids) - len(prompt) < new_tokens and end not in ids[len(prompt) :]:
            one = self._round(ids, first)
            rounds.append(one)
            new = [*one.tokens[1 : 1 + one.accepted], one.tokens[-1]]
            new = new[: new.index(end) + 1] if end in new else new
            ids += new
            first = self._draft.confirm(new)
            progress(len(ids) - len(prompt))
        return Decoded(ids, len(prompt), rounds)

    def _round(self, ids: list[int], first: int) -> Round:
        """Run one round behind `ids`, whose last token has no KV yet; `first` is the draft's token behind it."""
        n = len(ids) - 1
        chain = self._draft.run_ahead(first, self._rows - 1)  # the last is not verified: its step looks ahead only
        drafted = [ids[-1], first, *chain[:-1]]
        device = self._target.cache.keys[0].device
        zero, slots = torch.zeros(1, dtype=torch.int64, device=device), torch.arange(n, device=device)
        context = Context(slots.int().unsqueeze(0), zero, zero + n, n)
        selector = Selector(self._policy, self.budget, self._draft.signal, self._target.signal, self._target.pages)
        lookahead, history = (None if scores is None else scores[0] for scores in selector.scores(context))
        positions = self._policy.select(self.budget, lookahead, history, context)[0]

        seen = self._target.cache.extend(drafted)
        best = seen.logits.argmax(-1).tolist()
        right = [token == wanted for token, wanted in zip(drafted[1:], best)]
        accepted = right.index(False) if False in right else len(right)
        self._target.keep(seen, accepted)
        self._target.cache.length = n + 1 + accepted
        ahead, behind = (None if scores is None else scores[0] for scores in (lookahead, history))
        marks = sources(self.budget, positions, ahead, behind, n)
        mass = listed_mass(positions, seen.attention, self._size)
        return Round(n, [*drafted, best[accepted]], accepted, marks, ahead, behind, mass)


class _Side:
    """One model of the pair: its cache, the queries that outlive a forward, and its signal."""

    def __init__(
        self,
        model: TracedModel,
        heads: Heads,
        capacity: int,
        *,
        shift: int,
        steps: int = 0,
        attended: range | None = None,
    ) -> None:
        self._heads, self._shape, self._shift, self._steps = heads, model.shape, shift, steps
        self.cache = CachedModel(model, heads.layers, capacity, attended)

    def prefill(self, ids: list[int]) -> int:
        """Read the prompt and keep its last query; return the best next token."""
        seen = self.cache.prefill(ids)
        shape, key = self._shape, self.cache.keys[0]
        self._store = QueryStore(
            self._heads, shape.heads, shape.head_dim, num_slots=1, max_batch=1, pending_rows=1, steps=self._steps,
            dtype=key.dtype, device=key.device,
        )  # fmt: skip
        self.signal, self.pages = (self._signal(kind, shape) for kind in (Signal, PageBounds))
        self.keep(seen, 0)
        return int(seen.logits[-1].argmax())

    def _signal(self, kind: type[Signal], shape: ModelShape) -> Signal:
        keys = [self.cache.keys[layer] for layer in self._heads.layers]
        kv_heads = self._heads.kv_heads(shape.heads, shape.kv_heads)
        return kind(self._store, keys, kv_heads, self.cache.scale, shift=self._shift)

    def keep(self, seen: Forward, row: int) -> None:
        """Keep the queries of one row: that of the last confirmed token."""
        for layer, q in seen.queries.items():
            self._store.keep(layer, q[row : row + 1], torch.zeros(1, dtype=torch.int64, device=q.device))

    def run_ahead(self, token: int, steps: int) -> list[int]:
        """Draft `steps` more tokens behind `token`, leave their queries in the store, and forget them."""
        start, chain = self.cache.length, []
        for step in range(steps):
            seen = self.cache.extend([token])
            for layer, q in seen.queries.items():
                self._store.write_ahead(step, layer, q)
            token = int(seen.logits[-1].argmax())
            chain.append(token)
        self.cache.length = start
        return chain

    def confirm(self, tokens: list[int]) -> int:
        """Append confirmed tokens and keep the last one's query; return the best next token."""
        seen = self.cache.extend(tokens)
        self.keep(seen, len(tokens) - 1)
        return int(seen.logits[-1].argmax())
