"""What a calibration shows: a table, heat maps of the heads, and captured mass over the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dustin_sglang.calibrate.evaluate import AUTOMATIC, Row, choosers, recall_curve
from dustin_sglang.calibrate.settings import Settings
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.profile import Profile, auto_profile
from dustin_sglang.selection.heads import Heads

_BUDGETS = (128, 256, 512, 1024, 2048, 4096)


def render(table: Mapping[str, Row]) -> str:
    """The table as text."""
    lines = [f"{'list':<32} {'captured mass':>13} {'agreement':>9} {'KL':>8}"]
    lines += [f"{name:<32} {row.captured_mass:13.3f} {row.agreement:9.3f} {row.kl:8.4f}" for name, row in table.items()]
    return "\n".join(lines)


def draw(
    out: Path,
    profile: Profile,
    settings: Settings,
    ranks: Mapping[str, torch.Tensor],
    windows: Sequence[Window],
    measured_on: str,
) -> None:
    """Write both pictures beside the profile `out`.

    Parameters
    ----------
    ranks
        From `calibration.Data.ranks`.
    windows
        Those of the curves.
    """
    draw_heads(out.with_suffix(".heads.png"), ranks, {"draft": profile.lookahead, "target": profile.history})
    shortest = min(window.attention.shape[1] for window in windows)
    protected = settings.sinks + settings.window
    budgets = sorted({settings.budget, *(k for k in _BUDGETS if protected < k <= shortest // 2)})
    sizes = [replace(settings.size, budget=budget) for budget in budgets]
    named = choosers(profile, auto_profile(profile.draft, profile.target), settings.drafted)
    curves = {name: recall_curve(choose, windows, sizes) for name, choose in named.items()}
    draw_curves(out.with_suffix(".recall.png"), budgets, curves, f"{len(windows)} windows of {measured_on}")


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
    figure, (axis,) = _figure(1, width=9.0, height=4.5)
    policies = list(dict.fromkeys(name.split(",")[0] for name in curves))
    for name, values in curves.items():
        style = "--" if name.endswith(AUTOMATIC) else "-"
        axis.plot(budgets, values, style, color=f"C{policies.index(name.split(',')[0])}", marker=".", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.set(xlabel="budget (positions)", ylabel="captured mass (share of the best list's)", ylim=(0, 1.02))
    axis.set_title(subtitle, fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=100)


def _figure(count: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]
