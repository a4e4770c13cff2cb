"""Fit weights of scoring heads, so that the list of the best scores catches most of the attention.

The score of a position is a weighed sum over heads of their softmax mass there, as `policies.hybrid_sum` adds both
signals; weights are at least 0. Adam moves their logarithms, first by the cross-entropy between the target's attention
and the normalised score, which is smooth and has one minimum (a mixture of given distributions; see any text on
expectation maximisation), then by what a list of k misses, with a sigmoid in place of its threshold that hardens step
by step. Only positions that a policy can choose count, and of these the best candidates, which bounds memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.selection.heads import Heads

_CANDIDATES = 1536  # of a window, or three times what a list holds if that is more
_STEPS, _MORE, _FINE = 150, 50, 100  # from scratch, after a layer has gone, by missed mass
_RATE, _FINE_RATE = 0.05, 0.03  # of Adam, by cross-entropy and by missed mass
_SOFT, _HARD = 0.3, 0.12  # width of the sigmoid in log scores, at the first step and at the last
_LEAST = 0.01  # of a signal's largest weight; heads below it are dropped
_FLOOR = 1e-9  # share of a window's score that every candidate has at least, so that its logarithm exists


@dataclass(frozen=True)
class Examples:
    """What weights are fitted to.

    Attributes
    ----------
    scores
        float32 ``[windows, heads, candidates]``: lookahead heads, then history heads.
    totals
        float32 ``[windows, heads]``, scores summed over all positions that a policy can choose.
    wanted
        float32 ``[windows, candidates]``, the target's attention as a share of that on all these positions.
    free
        Positions that a list chooses.
    """

    scores: torch.Tensor
    totals: torch.Tensor
    wanted: torch.Tensor
    free: int

    @classmethod
    def of(cls, windows: Sequence[Window], lookahead: Heads, history: Heads, size: ListSize, device: str) -> Examples:
        """Examples of some heads; the candidates are the best by attention and by the plain sum of each signal."""
        shortest = min(size.middle(window.oracle).shape[0] for window in windows)
        count = min(shortest, max(_CANDIDATES, 3 * size.free))
        scores, totals, wanted = [], [], []
        for window in windows:
            signals = [
                size.middle(part[_index(heads)]).to(device).float()
                for part, heads in ((window.lookahead, lookahead), (window.history, history))
            ]
            attention = size.middle(window.oracle).to(device)
            plain = sum(_normalised(part) for part in (attention, *(signal.sum(0) for signal in signals)))
            best = torch.as_tensor(plain).topk(count, sorted=False).indices
            every = torch.cat(signals)
            scores.append(every[:, best])
            totals.append(every.sum(1))
            wanted.append(_normalised(attention)[best])
        return cls(torch.stack(scores), torch.stack(totals), torch.stack(wanted), size.free)

    def of_heads(self, kept: torch.Tensor) -> Examples:
        """The same for some of the heads, by their index."""
        return Examples(self.scores[:, kept], self.totals[:, kept], self.wanted, self.free)


Loss = Callable[[torch.Tensor, Examples, float], torch.Tensor]  # weights [heads], examples, progress from 0 to 1


def cross_entropy(weights: torch.Tensor, examples: Examples, progress: float = 1.0) -> torch.Tensor:
    """-sum p log q, p the wanted attention and q the score as a share of all scores; the mean over the windows."""
    score, total = _score(weights, examples)
    return -(examples.wanted * (score / total + _FLOOR).log()).sum(1).mean()


def missed_mass(weights: torch.Tensor, examples: Examples, progress: float = 1.0) -> torch.Tensor:
    """1 - softly captured mass: sum p sigmoid((log s - log t) / width) over what the best list holds.

    t is the score of the last listed position, and the width shrinks with `progress`; the mean over the windows. The
    gradient moves t with the scores so that the sum of all sigmoids stays (implicit function): with a constant t,
    weights that raise the scores of all candidates grow, and lists get worse.
    """
    score, total = _score(weights, examples)
    logs = (score / total + _FLOOR).log()
    width = _SOFT + (_HARD - _SOFT) * progress
    fixed = logs.detach()
    threshold = fixed.topk(examples.free).values[:, -1:]
    listed = ((fixed - threshold) / width).sigmoid()
    slope = listed * (1 - listed)
    threshold = threshold + (slope * (logs - fixed)).sum(1, keepdim=True) / slope.sum(1, keepdim=True)
    caught = (examples.wanted * ((logs - threshold) / width).sigmoid()).sum(1)
    return (1 - caught / examples.wanted.topk(examples.free).values.sum(1)).mean()


def fit(start: torch.Tensor, examples: Examples, loss: Loss, steps: int, rate: float) -> torch.Tensor:
    """Weights ``[heads]`` that minimise a loss, by Adam over their logarithms; its rate falls in the last third."""
    logs = start.clamp(min=1e-12).log().requires_grad_(True)
    adam = torch.optim.Adam([logs], lr=rate)
    for step in range(steps):
        adam.param_groups[0]["lr"] = rate * min(1.0, 3 * (1 - step / steps))
        adam.zero_grad()
        loss(logs.exp(), examples, step / steps).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return logs.detach().exp()


@dataclass(frozen=True)
class Fitted:
    """Heads with weights, the largest of each signal 1, and lookahead's share in policy hybrid-sum."""

    lookahead: Heads
    history: Heads
    share: float


def fit_heads(
    windows: Sequence[Window],
    lookahead: Heads,
    history: Heads,
    size: ListSize,
    rows: int,
    layers: int,
    device: str,
    report: Callable[[str], None] = lambda line: None,
) -> Fitted:
    """Choose the layers of lookahead among those of `lookahead`, and weights of their heads and of `history`.

    Backward elimination: the layer whose heads' absence costs the least cross-entropy goes, the others are fitted
    again, until `layers` are left.

    Parameters
    ----------
    rows
        Rows over which lookahead's scores are summed.
    """
    examples = Examples.of(windows, lookahead, history, size, device)
    places = [*lookahead.each, *((-1, head, 1.0) for _, head, _ in history.each)]
    layer_of = torch.tensor([layer for layer, *_ in places], device=device)  # -1: history
    mass = torch.tensor([float(rows)] * lookahead.count + [1.0] * history.count, device=device)
    counts = torch.where(layer_of >= 0, lookahead.count, history.count)
    weights = fit(1 / (counts * mass), examples, cross_entropy, _STEPS, _RATE)
    kept = torch.arange(len(places), device=device)
    while len(left := layer_of[kept].unique().tolist()) - 1 > layers:
        costs = {
            layer: float(cross_entropy(weights * (layer_of[kept] != layer), examples)) for layer in left if layer >= 0
        }
        worst = min(costs, key=lambda layer: costs[layer])
        stay = (layer_of[kept] != worst).nonzero()[:, 0]
        kept, weights, examples = kept[stay], weights[stay], examples.of_heads(stay)
        weights = fit(weights, examples, cross_entropy, _MORE, _RATE)
        report(f"lookahead - draft layer {worst}: cross-entropy {float(cross_entropy(weights, examples)):.4f}")
    weights = fit(weights, examples, missed_mass, _FINE, _FINE_RATE)
    report(f"weights of {len(kept)} heads: a list misses {float(missed_mass(weights, examples)):.4f} of the best one's")

    ahead = layer_of[kept] >= 0
    least = torch.where(ahead, weights[ahead].max(), weights[~ahead].max()) * _LEAST
    strong = weights >= least
    masses = weights * mass[kept] * strong
    share = round(float(masses[ahead].sum() / masses.sum()), 4)
    numbers, values = kept[strong].tolist(), weights[strong].tolist()
    each = [(number, value) for number, value in zip(numbers, values, strict=True)]
    return Fitted(
        _scaled([(*lookahead.each[i][:2], value) for i, value in each if i < lookahead.count]),
        _scaled([(*history.each[i - lookahead.count][:2], value) for i, value in each if i >= lookahead.count]),
        share,
    )


def _score(weights: torch.Tensor, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[windows, candidates]``, and their totals over all positions ``[windows, 1]``."""
    return weights @ examples.scores, (examples.totals @ weights).unsqueeze(1)


def _index(heads: Heads) -> tuple[list[int], list[int]]:
    return [layer for layer, *_ in heads.each], [head for _, head, _ in heads.each]


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum().clamp(min=1e-12)


def _scaled(each: Sequence[tuple[int, int, float]]) -> Heads:
    largest = max(weight for *_, weight in each)
    return Heads.of((layer, head, float(f"{weight / largest:.4g}")) for layer, head, weight in each)
