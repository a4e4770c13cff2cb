"""What quality compares: ways to choose a list, and the profiles that they choose by."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dustin_sglang.profile import ModelShape, Profile, auto_profile, find_profile, load_profile
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.policies import POLICIES

ORACLE = "oracle"  # the best list, which no policy can know: for analysis only
_OURS = ("hybrid", "hybrid-sum", "lookahead", "history")
CHOICES = (ORACLE, *_OURS, *(name for name, policy in POLICIES.items() if not policy.dense and name not in _OURS))
RANDOM_LAYERS, RANDOM_HEADS = 3, 4  # the paper's numbers for the draft; the target has one layer


@dataclass(frozen=True)
class Method:
    """One way to choose a list.

    Attributes
    ----------
    policy
        One of `CHOICES`.
    groups
        Groups of layers with a list each; for the oracle also as many as the target has layers.
    profile
        Name of the profile; None where no signal is used.
    share
        Lookahead share; None where the policy has none, or each group its own.
    extra_step
        Whether the last verified token looks ahead too (``--dustin-extra-step``); None where nothing looks ahead.
    """

    policy: str
    groups: int = 1
    profile: str | None = None
    share: float | None = None
    extra_step: bool | None = None


def make_methods(
    policies: Sequence[str],
    profiles: Mapping[str, Profile],
    shares: Sequence[float],
    layers: int,
    groups: Sequence[int] = (1,),
    extra_steps: Sequence[bool] = (True,),
) -> list[Method]:
    """Methods of the policies under each profile; the one-list oracle comes first, since it is the unit of the others.

    Parameters
    ----------
    groups
        Numbers of groups of layers; each policy takes those that it can, or one list if it cannot have groups at all.
    shares
        Lookahead shares for ``hybrid`` and ``hybrid-sum`` beside each profile's own.
    layers
        Of the target.
    extra_steps
        With and without the extra draft step, for policies that look ahead.
    """
    methods = [Method(ORACLE)]
    for policy in policies:
        if policy == ORACLE:
            methods += [Method(ORACLE, count) for count in dict.fromkeys([*groups, layers]) if count > 1]
        elif not (POLICIES[policy].uses_lookahead or POLICIES[policy].uses_history):
            methods.append(Method(policy))
        else:
            for name, profile in profiles.items():
                steps = extra_steps if POLICIES[policy].uses_lookahead else [None]
                methods += [
                    Method(policy, count, name, share, step)
                    for count in possible_groups(policy, groups, profile)
                    for share in _shares(policy, count, profile, shares)
                    for step in steps
                ]
    return methods


def possible_groups(policy: str, groups: Sequence[int], profile: Profile | None = None) -> list[int]:
    """Those of `groups` that a policy can have under a profile; 1 for a policy that can only have one list."""
    mixed = {} if profile is None else profile.grouped_lookahead
    possible = [count for count in groups if POLICIES[policy].why_not_groups(count, count in mixed) is None]
    return possible or [1] * (POLICIES[policy].why_not_groups(1) is None)


def _shares(policy: str, count: int, profile: Profile, others: Sequence[float]) -> list[float | None]:
    """Lookahead shares of a policy; None where it has none, or where each group of layers has its own."""
    if policy == "hybrid-sum" and count in profile.grouped_lookahead:
        return [None]
    return list(dict.fromkeys([profile.lookahead_share, *others])) if policy in ("hybrid", "hybrid-sum") else [None]


def make_profiles(
    names: Sequence[str], shapes: Mapping[str, ModelShape], paths: Mapping[str, Path], seed: int
) -> dict[str, Profile]:
    """Profiles by name.

    Parameters
    ----------
    names
        ``auto`` as at a launch, ``automatic`` for the one of unmeasured pairs, ``all-heads`` of the draft's upper half,
        ``random-heads`` (3 draft layers x 4 heads and 1 target layer x 4, by `seed`), or a file.
    shapes, paths
        Of ``draft`` and ``target``.

    Raises
    ------
    ProfileError
        A file that is missing, malformed or for other shapes.
    ValueError
        Two profiles of one name.
    """
    draft, target = shapes["draft"], shapes["target"]
    profiles: dict[str, Profile] = {}
    for name in names:
        if name == "auto":
            profile = find_profile(draft, target, {role: str(path) for role, path in paths.items()})
            name = profile.name if profile.name != "auto" else "automatic"
        elif name == "automatic":
            profile = auto_profile(draft, target)
        elif name == "all-heads":
            upper = tuple((layer, tuple(range(draft.heads))) for layer in range(draft.layers // 2, draft.layers))
            profile = Profile(draft, target, Heads(upper), auto_profile(draft, target).history, name=name)
        elif name == "random-heads":
            draws = random.Random(seed)
            profile = Profile(draft, target, _draw(draws, draft, RANDOM_LAYERS), _draw(draws, target, 1), name=name)
        else:
            profile = load_profile(name, draft, target)
            name = profile.name
        if name in profiles:
            raise ValueError(f"--profile: two profiles are called {name}; give each once, and files different names")
        profiles[name] = profile
    return profiles


def _draw(draws: random.Random, shape: ModelShape, layers: int) -> Heads:
    chosen = sorted(draws.sample(range(shape.layers), min(layers, shape.layers)))
    heads = range(shape.heads)
    return Heads(tuple((layer, tuple(sorted(draws.sample(heads, min(RANDOM_HEADS, shape.heads))))) for layer in chosen))
