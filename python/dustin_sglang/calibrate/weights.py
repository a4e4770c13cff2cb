"""Fit what each group of target layers makes of the draft's layers, and of history.

A group's score of a position is a weighed sum of parts: the softmax mass there of each draft layer, a mean over its
heads and rows, and of history. The weights maximise the log-likelihood of the group's own attention under the score
as a distribution over the positions that a policy can choose,

    sum over windows and positions x of  p(x) log(sum_i w_i r_i(x) / sum_i w_i T_i),   T_i = sum_x r_i(x),

by  w_i <- w_i * (sum p r_i / sum_j w_j r_j) / (sum T_i / sum_j w_j T_j)  over windows, which never lowers it: the first
logarithm is bounded below as in expectation maximisation for mixtures (Dempster, Laird and Rubin, 1977), the second
above by its tangent. No rate and no start matter: for weights of a total of 1 it is concave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.profile import GroupWeights
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups

_CANDIDATES = 2048  # of a window, or four times what a list holds if that is more: the others have next to no mass
_STEPS, _MORE, _LAST = 60, 20, 200  # from equal weights, after a layer has gone, at the end
_FLOOR = 1e-9  # added to every score, so that its logarithm exists


@dataclass(frozen=True)
class Examples:
    """What weights are fitted to.

    Attributes
    ----------
    parts
        float32 ``[windows, parts, candidates]``: each draft layer's mean mass, then history's.
    totals
        float32 ``[windows, parts]``, the same summed over all positions that a policy can choose.
    wanted
        float32 ``[windows, groups, candidates]``, each group's attention as a share of that on all these positions.
    """

    parts: torch.Tensor
    totals: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(
        cls,
        windows: Sequence[Window],
        layers: Sequence[int],
        history: Heads,
        groups: LayerGroups,
        size: ListSize,
        rows: int,
        device: str,
    ) -> Examples:
        """Examples of all heads of these draft layers, whose scores are summed over `rows`."""
        shortest = min(size.middle(window.oracle).shape[0] for window in windows)
        count = min(shortest, max(_CANDIDATES, 4 * size.free))
        parts, totals, wanted = [], [], []
        for window in windows:
            ahead = size.middle(window.lookahead[list(layers)]).to(device).float().mean(1) / rows
            places = ([layer for layer, *_ in history.each], [head for _, head, _ in history.each])
            back = size.middle(window.history[places]).to(device).float().mean(0)
            every = torch.cat([ahead, back.unsqueeze(0)])
            attention = size.middle(window.attention).to(device)
            own = torch.stack([attention[span.start : span.stop].sum(0) for span in groups.ranges])
            best = (_normalised(own).sum(0) + _normalised(every).sum(0)).topk(count, sorted=False).indices
            parts.append(every[:, best])
            totals.append(every.sum(-1))
            wanted.append(_normalised(own)[:, best])
        return cls(torch.stack(parts), torch.stack(totals), torch.stack(wanted))

    def of_parts(self, kept: list[int]) -> Examples:
        """The same with some of the parts."""
        return Examples(self.parts[:, kept], self.totals[:, kept], self.wanted)


def likelihood(weights: torch.Tensor, examples: Examples) -> torch.Tensor:
    """Mean log-likelihood a window, float32 ``[groups]``, of weights ``[groups, parts]``."""
    score, total = _score(weights, examples)
    return (examples.wanted * (score / total.unsqueeze(-1)).log()).sum(-1).mean(0)


def improve(weights: torch.Tensor, examples: Examples, steps: int) -> torch.Tensor:
    """Weights ``[groups, parts]`` after so many steps, each group's of sum 1."""
    for _ in range(steps):
        score, total = _score(weights, examples)
        gain = torch.einsum("wgc,wpc->gp", examples.wanted / score, examples.parts)
        weights = weights * gain / (1 / total).T.matmul(examples.totals).clamp(min=_FLOOR)
        weights = weights / weights.sum(1, keepdim=True)
    return weights


@dataclass(frozen=True)
class Fitted:
    """Draft layers that look ahead with all their heads, and what groups make of them, by the number of groups."""

    layers: tuple[int, ...]
    groups: dict[int, GroupWeights]


def fit_layers(
    windows: Sequence[Window],
    history: Heads,
    groups: Sequence[LayerGroups],
    size: ListSize,
    rows: int,
    count: int,
    device: str,
    report: Callable[[str], None] = lambda line: None,
) -> Fitted:
    """Choose `count` draft layers, and the weights of every number of groups.

    Backward elimination under the most groups: the layer without which the likelihood falls least goes, the others are
    fitted again, until `count` are left.

    Parameters
    ----------
    rows
        Rows over which the windows' lookahead scores are summed.
    """
    layers = list(range(windows[0].lookahead.shape[0]))
    most = max(groups, key=lambda one: one.count)
    examples = Examples.of(windows, layers, history, most, size, rows, device)
    weights = improve(_equal(most, len(layers), device), examples, _STEPS)
    while len(layers) > count:
        without = []
        for place in range(len(layers)):
            left = weights.clone()
            left[:, place] = 0
            without.append(float(likelihood(left, examples).mean()))
        worst = max(range(len(layers)), key=without.__getitem__)
        kept = [place for place in range(len(layers) + 1) if place != worst]
        report(f"lookahead - draft layer {layers.pop(worst)}: log-likelihood {without[worst]:.4f}")
        examples = examples.of_parts(kept)
        weights = improve(weights[:, kept], examples, _MORE)
    found = {}
    for one in groups:
        own = examples if one is most else Examples.of(windows, layers, history, one, size, rows, device)
        found[one.count] = _weights(improve(_equal(one, len(layers), device), own, _LAST))
        shares = " ".join(f"{share:.2f}" for share in found[one.count].shares)
        report(f"{one.count} groups of layers: lookahead's share {shares}")
    return Fitted(tuple(layers), found)


def _equal(groups: LayerGroups, layers: int, device: str) -> torch.Tensor:
    return torch.full((groups.count, layers + 1), 1 / (layers + 1), device=device)


def _weights(weights: torch.Tensor) -> GroupWeights:
    ahead = weights[:, :-1].sum(1, keepdim=True)
    layers = (weights[:, :-1] / ahead).double().round(decimals=4)
    layers = layers / layers.sum(1, keepdim=True)
    shares = ahead[:, 0].double().tolist()
    return GroupWeights(
        tuple(tuple(round(weight, 4) for weight in group) for group in layers.tolist()),
        tuple(round(share, 4) for share in shares),
    )


def _score(weights: torch.Tensor, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[windows, groups, candidates]`` and their totals over all positions ``[windows, groups]``."""
    score = torch.einsum("gp,wpc->wgc", weights, examples.parts) + _FLOOR
    return score, examples.totals @ weights.T + _FLOOR


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-12)
