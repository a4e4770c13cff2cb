"""Pictures of a calibration: heat maps of the heads and captured mass over the budget, as PNG beside the profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dustin_sglang.selection.heads import Heads


def draw_heads(file: Path, ranks: Mapping[str, torch.Tensor], chosen: Mapping[str, Heads]) -> None:
    """Heat maps layer x head.

    Parameters
    ----------
    ranks
        Title to ``[layers, heads]``; a title starts with the role whose chosen heads are marked.
    chosen
        Role (``draft``, ``target``) to its heads.
    """
    figure, axes = _figure(len(ranks), width=4.0, height=6.0)
    for axis, (title, values) in zip(axes, ranks.items(), strict=True):
        image = axis.imshow(values.numpy(), aspect="auto", cmap="viridis", vmin=0)
        axis.set(title=title, xlabel="query head", ylabel="layer")
        for layer, heads in chosen[title.split()[0]].by_layer:
            axis.scatter(heads, [layer] * len(heads), marker="o", facecolors="none", edgecolors="red", s=18)
        figure.colorbar(image, ax=axis)
    figure.suptitle("Red circles: heads of the profile", fontsize=9)
    figure.savefig(file, dpi=100)


def draw_curves(file: Path, budgets: Sequence[int], curves: Mapping[str, Sequence[float]], subtitle: str) -> None:
    """Captured mass over the budget, one line a way to choose."""
    figure, (axis,) = _figure(1, width=7.0, height=4.5)
    for name, values in curves.items():
        axis.plot(budgets, values, marker=".", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.set(xlabel="budget (positions)", ylabel="captured mass (share of the best list's)", ylim=(0, 1.02))
    axis.set_title(subtitle, fontsize=9)
    axis.legend(fontsize=7)
    figure.savefig(file, dpi=100)


def _figure(count: int, width: float, height: float):  # type: ignore[no-untyped-def]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]
