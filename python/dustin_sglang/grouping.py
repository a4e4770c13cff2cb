"""What the groups of target layers of a launch score: the profile as its policy uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dustin_sglang.config import DustinConfig
from dustin_sglang.profile import GroupWeights, Profile, default_groups
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.policies import POLICIES, Budget, Policy
from dustin_sglang.selection.policies.base import SUMMED


@dataclass(frozen=True)
class Grouping:
    """Groups of layers under a profile and a policy.

    Where the profile says what so many groups make of lookahead, and the policy mixes, the draft's layers are scored
    one by one, each group weighs them, and all groups share one history. Otherwise lookahead is one score for all
    groups, and each has a history of its own.
    """

    profile: Profile
    policy: Policy
    groups: LayerGroups

    @cached_property
    def weights(self) -> GroupWeights | None:
        """What each group makes of lookahead; None where all make the same of it."""
        return self.profile.grouped_lookahead.get(self.groups.count) if self.policy.mixes else None

    @cached_property
    def lookahead(self) -> tuple[Heads, ...]:
        """Heads that are scored together: of each layer, or all of them."""
        heads = self.profile.lookahead
        if self.weights is None:
            return (heads,)
        return tuple(Heads.of(place for place in heads.each if place[0] == layer) for layer in heads.layers)

    @cached_property
    def history(self) -> tuple[Heads, ...]:
        """History heads of every group that the policy scores it for, or of all groups."""
        if self.weights is not None:
            return (self.profile.history,)
        return self.profile.group_history(self.groups)[-self.policy.history_groups(self.groups.count) :]

    def mix(self, device: torch.device | str) -> torch.Tensor | None:
        """The weights, float32 ``[groups, lookahead layers]``; None where nothing is mixed."""
        return None if self.weights is None else torch.tensor(self.weights.lookahead, device=device)

    def budget(self, total: int, sinks: int, window: int, share: float | None = None) -> Budget:
        """Divide a list's positions; `share` is instead of the profile's lookahead share, in all groups."""
        budget = self.policy.budget(total, sinks, window, self.profile.lookahead_share if share is None else share)
        if self.weights is not None and share is None and budget.rest == SUMMED:
            return replace(budget, shares=self.weights.shares)
        return budget

    def of_one(self, group: int) -> Profile:
        """The profile by which one group would choose if it were alone: weights of layers become those of heads."""
        if self.weights is None:
            histories = self.profile.group_history(self.groups)
            return replace(self.profile, history=histories[group], grouped_lookahead={}, layer_groups=1)
        # A layer's score is a mean over its heads.
        factors = {
            part.layers[0]: weight / (sum(head for *_, head in part.each) or 1.0)
            for part, weight in zip(self.lookahead, self.weights.lookahead[group], strict=True)
        }
        ahead = Heads.of((layer, head, weight * factors[layer]) for layer, head, weight in self.profile.lookahead.each)
        share = self.weights.shares[group]
        return replace(self.profile, lookahead=ahead, lookahead_share=share, grouped_lookahead={}, layer_groups=1)


def count_groups(config: DustinConfig, paths: Mapping[str, str]) -> int:
    """Groups of layers of a launch: those that it asks for, else the profile's, else one.

    Parameters
    ----------
    paths
        Folders (or names on a hub) of ``draft`` and ``target``.
    """
    if config.layer_groups is not None:
        return config.layer_groups
    return default_groups(config.profile, paths) if POLICIES[config.policy].mixes else 1
