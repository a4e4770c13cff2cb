"""Choose heads and the split by an objective.

The unit is a KV head with all query heads that read it: its keys are read once for all of them, so the others cost no
bytes (and more heads choose better: selection.md, finding 2). A cost is the keys read for one token of context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.objective import Objective, split_positions
from dustin_sglang.profile import ModelShape
from dustin_sglang.selection.heads import Heads

Unit = tuple[int, int]  # (layer, KV head)


@dataclass(frozen=True)
class Step:
    """One addition of the greedy search: the unit and the objective's mean over the windows with it."""

    unit: Unit
    value: float


def heads_of(units: Sequence[Unit], shape: ModelShape) -> Heads:
    """All query heads of some KV heads."""
    group = shape.heads // shape.kv_heads
    by_layer: dict[int, list[int]] = {}
    for layer, kv_head in sorted(units):
        by_layer.setdefault(layer, []).extend(range(kv_head * group, (kv_head + 1) * group))
    return Heads(tuple((layer, tuple(heads)) for layer, heads in by_layer.items()))


def score(scores: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Weighed sum float32 ``[context]`` of the scores ``[layers, heads, context]`` of some heads."""
    layers, numbers, weights = (list(part) for part in zip(*heads.each))
    return torch.tensor(weights) @ scores[layers, numbers].float()


def by_kv_head(scores: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Scores ``[layers, kv_heads, context]``, summed over the query heads that read a KV head."""
    return scores.float().unflatten(1, (shape.kv_heads, -1)).sum(2).to(scores.dtype)


def mean_value(objective: Objective, scores: Iterable[torch.Tensor]) -> torch.Tensor:
    """Mean over the windows of the values of candidates, whose scores in each are ``[candidates, context]``."""
    values = [objective.of_scores(window, part.float()) for window, part in enumerate(scores)]
    return torch.stack(values).mean(0)


def layer_values(objective: Objective, scores: Iterable[torch.Tensor]) -> torch.Tensor:
    """Values float32 ``[layers]`` of all heads of each layer; `scores` are ``[layers, heads, context]`` a window."""
    return mean_value(objective, (part.float().sum(1) for part in scores))


def add_greedily(
    objective: Objective,
    scores: Sequence[torch.Tensor],
    candidates: Sequence[Unit],
    most: int,
    report: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Add the unit that is best together with those chosen, until none helps or there are `most`.

    Parameters
    ----------
    scores
        For each window, the scores ``[layers, kv_heads, context]`` of all units.
    most
        Largest number of units: the byte cost over the bytes of one.
    """
    left, steps = list(candidates), list[Step]()
    sums = [torch.zeros(part.shape[-1]) for part in scores]
    while left and len(steps) < most:
        layers, kv_heads = (list(part) for part in zip(*left))
        together = [part[layers, kv_heads].float() + total for part, total in zip(scores, sums)]
        values = mean_value(objective, together)
        best = int(values.argmax())
        step = Step(left[best], float(values[best]))
        if steps and step.value <= steps[-1].value:
            break
        steps.append(step)
        report(step)
        for part, total in zip(scores, sums):
            total += part[step.unit].float()
        left.remove(step.unit)
    return steps


def by_rank(ranks: torch.Tensor, shape: ModelShape, candidates: Sequence[Unit], most: int) -> list[Unit]:
    """The `most` candidates whose best query head ranks highest; `ranks` is ``[layers, heads]``, larger is better."""
    best = ranks.unflatten(1, (shape.kv_heads, -1)).amax(-1)
    return sorted(candidates, key=lambda unit: (-float(best[unit]), unit))[:most]


def choose_share(
    objective: Objective,
    ahead: Sequence[torch.Tensor],
    back: Sequence[torch.Tensor],
    size: ListSize,
    trials: int,
    seed: int,
) -> tuple[float, float]:
    """The best lookahead share of a budget split, by optuna's TPE sampler, and its value.

    Parameters
    ----------
    ahead, back
        For each window, the scores ``[context]`` of the chosen heads.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def value(trial: optuna.Trial) -> float:
        share = trial.suggest_float("share", 0.0, 1.0, step=0.05)
        lists = [split_positions(a, b, size, share) for a, b in zip(ahead, back)]
        return sum(objective.of_list(window, one) for window, one in enumerate(lists)) / len(lists)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(value, n_trials=trials, show_progress_bar=True)
    return float(study.best_params["share"]), float(study.best_value)
