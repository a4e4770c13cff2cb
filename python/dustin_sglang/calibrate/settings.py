"""The numbers of one calibration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dustin_sglang.calibrate.evaluate import Row
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.texts import WINDOWS_A_PASSAGE

OBJECTIVES = ("kl", "mass", "needle")
WEIGHTS = ("fit", "equal")


@dataclass(frozen=True)
class Settings:
    """What the measurements and the choice depend on, beside models and texts.

    Attributes
    ----------
    windows
        Verifications to measure, an even number; half of them answer a question about a needle.
    context
        Committed tokens of a window, roughly.
    rows
        Rows of a verification: drafted tokens and the one before them.
    extra_step
        Lookahead has a query for every row; else for all but the last drafted token's.
    budget, sinks, window
        As the flags of a launch.
    cost
        Bytes of K that lookahead may read, as a share of the target's K and V.
    draft_layers
        Draft layers that look ahead where weights are fitted; None: as many as `cost` allows.
    weights
        One of `WEIGHTS`: whether draft layers have fitted weights for each group of target layers, or heads count 1
        each.
    objective
        One of `OBJECTIVES`.
    layer_groups
        Numbers of groups of target layers for which weights are fitted, or history is chosen, too.
    trials
        Splits that optuna tries.
    seed
        Of passages, needles and optuna.
    """

    windows: int = 24
    context: int = 3000
    rows: int = 5
    extra_step: bool = True
    budget: int = 512
    sinks: int = 4
    window: int = 64
    cost: float = 1 / 16
    draft_layers: int | None = None
    weights: str = "equal"
    objective: str = "kl"
    layer_groups: tuple[int, ...] = ()
    trials: int = 20
    seed: int = 0

    @property
    def size(self) -> ListSize:
        """Size of a list."""
        return ListSize(self.budget, self.sinks, self.window)

    @property
    def drafted(self) -> int:
        """Rows with a lookahead query."""
        return self.rows if self.extra_step else self.rows - 1

    @property
    def passages(self) -> int:
        """Passages that give the windows."""
        return self.windows // WINDOWS_A_PASSAGE

    @property
    def of_measurements(self) -> dict[str, object]:
        """The settings on which a measured passage depends."""
        names = ("context", "rows", "extra_step", "budget", "sinks", "window", "seed")
        return {name: getattr(self, name) for name in names}

    def describe(self, table: dict[str, Row], measured_on: str) -> dict[str, Any]:
        """What goes under ``measured`` in the profile."""
        rows = {name: {key: round(value, 4) for key, value in asdict(row).items()} for name, row in table.items()}
        return {**asdict(self), "cost": round(self.cost, 6), "measured_on": measured_on, "table": rows}
