"""Measure a passage: read it once with each model, choose lists by the product's own code, verify over each.

The windows of a passage are a batch of requests that share one context, each with a committed length of its own, so
`dustin_kernels` scores and selects for all of them at once. What the rows are: `dustin_sglang.calibrate.windows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from quality_methods import ORACLE, Method
from quality_texts import Passage

from dustin_kernels import select_positions
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.trace import Layer, TracedModel, attention_weights
from dustin_sglang.grouping import Grouping
from dustin_sglang.profile import ModelShape, Profile
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.page_bounds import PageBounds
from dustin_sglang.selection.policies import POLICIES
from dustin_sglang.selection.policies.hybrid_sum import HybridSum
from dustin_sglang.selection.signals import Signal

COLUMNS = ("kl", "agreement", "mass", "nll", "dense_nll")
AT_ONCE = 32  # lists of one forward


@dataclass(frozen=True)
class _Queries:
    """Queries ``[windows, rows, heads, head_dim]`` as a signal asks the engine's store for them."""

    heads: Heads
    rows: torch.Tensor

    def queries(self, req_pool_indices: torch.Tensor, *, drafted: bool = True) -> torch.Tensor:
        return self.rows


class _Recorder:
    """Keeps some layers' keys, and their queries at some rows of every window."""

    def __init__(self, shape: ModelShape, layers: set[int], rows: torch.Tensor) -> None:
        self._shape, self._layers, self._rows = shape, layers, rows
        self._keys: dict[int, torch.Tensor] = {}
        self._queries: dict[int, torch.Tensor] = {}  # [windows, rows, heads, head_dim]
        self._scale = 1.0

    def see(self, layer: Layer) -> None:
        if layer.index in self._layers:
            self._keys[layer.index] = layer.k.transpose(0, 1)
            self._queries[layer.index] = layer.q[:, self._rows].permute(1, 2, 0, 3)
            self._scale = layer.scale

    def score(
        self,
        groups: Sequence[Heads],
        kind: type[Signal],
        context: Context,
        rows: slice,
        shift: int,
        mix: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores float32 ``[groups, windows, context.max_len]`` of each group's heads by the queries of `rows`.

        `mix` is as `Signal` takes it.
        """
        heads = Heads.of(place for group in groups for place in group.each)
        parts = [self._queries[layer][:, rows, list(chosen)] for layer, chosen in heads.by_layer]
        kv_heads = heads.kv_heads(self._shape.heads, self._shape.kv_heads)
        keys = [self._keys[layer] for layer in heads.layers]
        store = _Queries(heads, torch.cat(parts, dim=2).contiguous())
        places = heads.places(groups)
        signal = kind(store, keys, kv_heads, self._scale, shift=shift, parts=places, mix=mix)  # type: ignore[arg-type]
        return signal.score(context)


class Reading:
    """What both models say about the windows of a passage.

    Parameters
    ----------
    target, draft
        The models; each reads the passage once.
    rows
        Verified rows of a window.
    profiles
        Heads whose scores are wanted.
    groups
        Numbers of groups of layers for which histories are wanted.
    """

    def __init__(
        self,
        target: TracedModel,
        draft: TracedModel,
        passage: Passage,
        rows: int,
        profiles: Mapping[str, Profile],
        groups: Sequence[int] = (1,),
    ) -> None:
        self.ids, self.rows = passage.ids, rows
        self.lengths = [place.length for place in passage.places]
        end, device = max(self.lengths) + rows, target.device
        lengths = torch.tensor(self.lengths, device=device)
        prompts = torch.tensor([place.prompt for place in passage.places], device=device)
        self.context, self.prompts = self._batch(lengths, end), self._batch(prompts, end)
        self.profiles = profiles
        self.groups = {count: LayerGroups(target.shape.layers, count) for count in {1, target.shape.layers, *groups}}
        histories = {
            (name, count): profile.group_history(self.groups[count])
            for name, profile in profiles.items()
            for count in dict.fromkeys([1, *groups])
        }

        # float32 [windows, layers, max_len]: attention of the verified rows, summed over rows and heads.
        self.oracle = torch.zeros(len(self.lengths), target.shape.layers, end, device=device)
        last = torch.stack([lengths - 1, prompts - 1], dim=1)
        watched = {layer for parts in histories.values() for part in parts for layer in part.layers}
        back = _Recorder(target.shape, watched, last)

        def see_target(layer: Layer) -> None:
            back.see(layer)
            for w, n in enumerate(self.lengths):
                verified = layer.q[:, n : n + rows]
                weights = attention_weights(verified, layer.k[:, : n + rows], layer.scale, own_rows=True)
                self.oracle[w, layer.index, :n] = weights[:, :, :n].sum((0, 1))

        self.prefix = Prefix(target, self.ids[:end], see_target)
        drafted = lengths[:, None] - 1 + torch.arange(rows, device=device)  # the last one's is the extra step's
        watched = {layer for profile in profiles.values() for layer in profile.lookahead.layers}
        ahead = _Recorder(draft.shape, watched, drafted)
        draft.read(self.ids[1:end], ahead.see, [0])

        self._dense: dict[int, torch.Tensor] = {}
        now, then, steps = slice(0, 1), slice(1, 2), {True: slice(rows), False: slice(rows - 1)}
        # By profile, groups and whether there is an extra step; groups that share lookahead have that of one.
        self.lookahead = {
            (name, count, extra): ahead.score(one.lookahead, Signal, self.context, seen, 1, mix=one.mix(device))
            for name, profile in profiles.items()
            for count in {1, *profile.grouped_lookahead} & {1, *groups}
            for one in [Grouping(profile, HybridSum(), self.groups[count])]
            for extra, seen in steps.items()
        }
        self.at_prompt = {name: back.score(histories[name, 1], Signal, self.prompts, then, 0)[0] for name in profiles}
        self.history, self.pages = {}, {}  # by profile and number of groups
        for key, parts in histories.items():
            self.history[key] = back.score(parts, Signal, self.context, now, 0)
            self.pages[key] = back.score(parts, PageBounds, self.context, now, 0)

    @staticmethod
    def _batch(lengths: torch.Tensor, max_len: int) -> Context:
        """Requests of these lengths whose KV lies in the slots of their positions."""
        count, device = len(lengths), lengths.device
        slots = torch.arange(max_len, dtype=torch.int32, device=device).expand(count, -1).contiguous()
        return Context(slots, torch.arange(count, device=device), lengths, max_len)

    def dense(self, w: int) -> torch.Tensor:
        """Log-probabilities ``[rows, vocab]`` of window `w` verified over its whole context."""
        if w not in self._dense:
            everything = torch.arange(self.lengths[w]).unsqueeze(0)
            self._dense[w] = self.prefix.verify(self.lengths[w], self.rows, everything)[0].log_softmax(-1)
        return self._dense[w]

    def lists(self, method: Method, size: ListSize) -> torch.Tensor:
        """Lists int32 ``[windows, groups, budget]``; -1 beyond a context that is shorter."""
        if method.policy == ORACLE:
            ranges = self.groups[method.groups].ranges
            scores = torch.stack([self.oracle[:, list(layers)].sum(1) for layers in ranges], dim=1)
            best = select_positions(
                None,
                scores.flatten(0, 1),
                self.context.seq_lens.repeat_interleave(method.groups),
                budget=size.budget,
                sinks=size.sinks,
                window=size.window,
                num_lookahead=0,
            )
            return best.unflatten(0, (-1, method.groups))
        policy = POLICIES[method.policy]()
        if method.profile is None:
            budget = policy.budget(size.budget, size.sinks, size.window, 0.0)
            return policy.select_groups(budget, None, None, self.context).transpose(0, 1)
        grouping = Grouping(self.profiles[method.profile], policy, self.groups[method.groups])
        mixed = grouping.weights is not None
        budget = grouping.budget(size.budget, size.sinks, size.window, method.share)
        ahead = None
        if policy.uses_lookahead:
            ahead = self.lookahead[method.profile, method.groups if mixed else 1, method.extra_step]
        history = None
        if policy.uses_history:
            key = (method.profile, 1 if mixed else method.groups)
            history = (self.pages if policy.paged else self.history)[key][-len(grouping.history) :]
        if policy.name == "snapkv":
            policy.select(budget, None, self.at_prompt[method.profile], self.prompts)
        return policy.select_groups(budget, ahead, history, self.context).transpose(0, 1)

    def by_layer(self, lists: torch.Tensor) -> torch.Tensor:
        """The list of every layer ``[windows, layers, budget]`` from those of groups ``[windows, groups, budget]``."""
        groups = self.groups[lists.shape[1]]
        return lists[:, [groups.of(layer) for layer in range(groups.layers)]]


def measure(reading: Reading, methods: Sequence[Method], size: ListSize) -> dict[Method, torch.Tensor]:
    """Measure methods at one budget.

    Returns
    -------
    dict
        float64 ``[windows, COLUMNS]`` each: KL(dense || sparse) in nats a row, share of rows with the dense best token,
        captured mass as a share of the best single list's, and -log p of the text's own next tokens, sparse and dense.
    """
    # int64 [windows, methods, layers, budget]
    lists = torch.stack([reading.by_layer(reading.lists(method, size)) for method in methods], dim=1).long()
    tables = []
    for w, n in enumerate(reading.lengths):
        following = torch.tensor(reading.ids[n + 1 : n + reading.rows + 1], device=lists.device)
        dense = reading.dense(w)
        chosen = lists[w, :, :, :n]  # a context within the budget is listed whole
        distinct, which = chosen.unique(dim=0, return_inverse=True)
        parts = [verify_and_compare(reading, n, some, dense, following) for some in distinct.split(AT_ONCE)]
        kl, agreement, nll = torch.cat(parts)[which].unbind(1)
        dense_nll = -dense.gather(1, following[:, None]).mean().expand(len(methods))
        masses = captured_masses(chosen, reading.oracle[w, :, :n], size)
        tables.append(torch.stack([kl, agreement, masses, nll, dense_nll], dim=1).double().cpu())
    return dict(zip(methods, torch.stack(tables, dim=1)))


def verify_and_compare(
    reading: Reading, n: int, lists: torch.Tensor, dense: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """KL, agreement and -log p of the following tokens, float32 ``[lists, 3]``, means over rows.

    Parameters
    ----------
    lists
        int64 ``[lists, layers, budget]``.
    dense
        Log-probabilities ``[rows, vocab]``.
    """
    sparse = reading.prefix.verify(n, reading.rows, lists.transpose(0, 1)).log_softmax(-1)
    kl = (dense.exp() * (dense - sparse)).sum(-1).mean(-1)
    agreement = (dense.argmax(-1) == sparse.argmax(-1)).float().mean(-1)
    nll = -sparse.gather(2, following[None, :, None].expand(len(lists), -1, 1)).mean((1, 2))
    return torch.stack([kl, agreement, nll], dim=1)


def captured_masses(lists: torch.Tensor, oracle: torch.Tensor, size: ListSize) -> torch.Tensor:
    """Attention between sinks and window that lists hold, as a share of the best single list's; float32 ``[lists]``.

    Parameters
    ----------
    lists
        int64 ``[lists, layers, budget]`` of one window.
    oracle
        float32 ``[layers, context]``.
    """
    middle = oracle.clone()
    middle[:, : size.sinks] = 0
    middle[:, oracle.shape[1] - size.window :] = 0
    best = middle.sum(0).topk(min(size.free, middle.shape[1])).values.sum()
    return middle.expand(len(lists), -1, -1).gather(2, lists).sum((1, 2)) / best
