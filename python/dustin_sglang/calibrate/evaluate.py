"""Measure policies and profiles on windows: captured mass, and the cost of their lists in a simulated verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dustin_kernels import mix_scores
from dustin_sglang.calibrate.mass import ListSize, listed_mass
from dustin_sglang.calibrate.objective import best_positions
from dustin_sglang.calibrate.search import score
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.grouping import Grouping
from dustin_sglang.profile import Profile
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.policies import POLICIES

AUTOMATIC = "automatic profile"  # how the rows of that profile end

Chooser = Callable[[Window, ListSize], torch.Tensor]  # int [layers, budget]


@dataclass(frozen=True)
class Row:
    """Means over windows.

    Attributes
    ----------
    captured_mass
        Share of what the best single list captures.
    agreement
        Share of verified rows whose best token is the dense verification's.
    kl
        KL(dense || sparse) in nats.
    """

    captured_mass: float
    agreement: float
    kl: float


def oracle(window: Window, size: ListSize) -> torch.Tensor:
    """The best single list, which no policy can know: for analysis only."""
    return best_positions(window.oracle, size).expand(len(window.attention), -1)


def choose_with(policy_name: str, profile: Profile, rows: int, count: int = 1) -> Chooser:
    """What a launch's policy lists under a profile, for each layer by its group.

    Parameters
    ----------
    rows
        Rows over which the windows' lookahead scores are summed.
    """
    policy, groups = POLICIES[policy_name](), LayerGroups(profile.target.layers, count)
    grouping, group_of = Grouping(profile, policy, groups), [groups.of(layer) for layer in range(groups.layers)]
    mix = grouping.mix("cpu")

    def choose(window: Window, size: ListSize) -> torch.Tensor:
        n = window.attention.shape[1]
        ahead, back = (
            torch.stack([score(scores, part) / (of * sum(w for *_, w in part.each)) for part in parts]).unsqueeze(1)
            for scores, parts, of in (
                (window.lookahead, grouping.lookahead, rows),
                (window.history, grouping.history, 1),
            )
        )
        if mix is not None:
            ahead = mix_scores(ahead, mix)
        budget = grouping.budget(size.budget, size.sinks, size.window)
        context = Context(torch.zeros(1, n, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.tensor([n]), n)
        lists = policy.select_groups(
            budget, ahead if policy.uses_lookahead else None, back if policy.uses_history else None, context
        )[:, 0]
        return lists[group_of] if len(lists) > 1 else lists.expand(groups.layers, -1)

    return choose


def choosers(profile: Profile, automatic: Profile, rows: int) -> dict[str, Chooser]:
    """The rows of the report's table."""
    named: dict[str, Chooser] = {"oracle (one list)": oracle}
    for name in ("hybrid", "hybrid-sum", "lookahead", "history"):
        named[f"{name}, this profile"] = choose_with(name, profile, rows)
        named[f"{name}, {AUTOMATIC}"] = choose_with(name, automatic, rows)
    for count in profile.grouped_lookahead:
        named[f"hybrid-sum, {count} lists, this profile"] = choose_with("hybrid-sum", profile, rows, count)
    for count in profile.grouped_history:
        named[f"hybrid, {count} lists, this profile"] = choose_with("hybrid", profile, rows, count)
    return named | {name: choose_with(name, profile, rows) for name in ("streaming", "random")}


def measure(
    named: Mapping[str, Chooser],
    windows: Sequence[Window],
    places: Sequence[tuple[Prefix, int]],
    rows: int,
    size: ListSize,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Row]:
    """Means of every chooser over the windows, whose texts and committed lengths are `places`."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in named}
    for window, (prefix, n) in zip(windows, places, strict=True):
        lists = torch.stack([choose(window, size) for choose in named.values()], dim=1)
        for name, positions, outcome in zip(named, lists.unbind(1), prefix.compare(n, rows, lists)):
            mass = listed_mass(positions, window.attention, size)
            sums[name] += torch.tensor([mass, outcome.agreement, outcome.kl])
        progress()
    return {name: Row(*(total / len(windows)).tolist()) for name, total in sums.items()}


def recall_curve(choose: Chooser, windows: Sequence[Window], sizes: Sequence[ListSize]) -> list[float]:
    """Mean captured mass at several sizes of the list."""
    return [
        sum(listed_mass(choose(window, size), window.attention, size) for window in windows) / len(windows)
        for size in sizes
    ]
