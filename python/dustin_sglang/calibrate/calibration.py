"""The whole calibration of a pair: read passages, choose heads and split, measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from dustin_sglang.calibrate.evaluate import Row, choosers, measure
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.objective import Divergence, Mass, Objective
from dustin_sglang.calibrate.search import (
    Unit,
    add_greedily,
    by_rank,
    choose_share,
    heads_of,
    layer_values,
    score,
)
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.store import Measured, Store
from dustin_sglang.calibrate.texts import WINDOWS_A_PASSAGE, Passage, Texts
from dustin_sglang.calibrate.trace import TracedModel
from dustin_sglang.calibrate.windows import Window, collect
from dustin_sglang.profile import Profile, auto_profile
from dustin_sglang.selection.heads import Heads

OBJECTIVES = ("kl", "mass", "needle")


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
    budget, sinks, window
        As the flags of a launch.
    cost
        Bytes of K that lookahead may read, as a share of the target's K and V.
    objective
        One of `OBJECTIVES`.
    trials
        Splits that optuna tries.
    seed
        Of passages, needles and optuna.
    """

    windows: int = 24
    context: int = 3000
    rows: int = 5
    budget: int = 512
    sinks: int = 4
    window: int = 64
    cost: float = 1 / 16
    objective: str = "kl"
    trials: int = 20
    seed: int = 0

    @property
    def size(self) -> ListSize:
        """Size of a list."""
        return ListSize(self.budget, self.sinks, self.window)

    @property
    def passages(self) -> int:
        """Passages that give the windows."""
        return self.windows // WINDOWS_A_PASSAGE

    @property
    def of_measurements(self) -> dict[str, object]:
        """The settings on which a measured passage depends."""
        return {name: getattr(self, name) for name in ("context", "rows", "budget", "sinks", "window", "seed")}

    def describe(self, table: dict[str, Row], measured_on: str) -> dict[str, Any]:
        """What goes under ``measured`` in the profile."""
        rows = {name: {key: round(value, 4) for key, value in asdict(row).items()} for name, row in table.items()}
        return {**asdict(self), "cost": round(self.cost, 6), "measured_on": measured_on, "table": rows}


@dataclass(frozen=True)
class Data:
    """Measured passages of one set of texts."""

    passages: list[Passage]
    measured: list[Measured]

    @property
    def windows(self) -> list[Window]:
        """All windows."""
        return [window for one in self.measured for window in one.windows]

    def ranks(self) -> dict[str, torch.Tensor]:
        """Mean ranks ``[layers, heads]`` of both models, by title."""
        windows = self.windows
        ranks = {
            "draft mass": torch.stack([w.lookahead_mass for w in windows]).mean(0),
            "target mass": torch.stack([w.history_mass for w in windows]).mean(0),
        }
        for role in ("draft", "target"):
            masses = [m.retrieval[role] for m in self.measured if m.retrieval and m.retrieval[role].any()]
            empty = torch.zeros_like(ranks[f"{role} mass"])
            ranks[f"{role} retrieval"] = torch.stack(masses).mean(0) if masses else empty
        return ranks


class Calibration:
    """Calibrates one pair.

    Parameters
    ----------
    target, draft
        The models.
    settings
        What to do.
    """

    def __init__(self, target: TracedModel, draft: TracedModel, settings: Settings) -> None:
        self.target, self.draft, self.settings = target, draft, settings

    def read(self, texts: Texts, store: Store, label: str) -> Data:
        """Measure the passages that the store does not have."""
        passages, measured = [], []
        for number in tqdm(range(self.settings.passages), desc=f"reading {label}"):
            passage = texts.passage(number)
            found = store.load(number)
            if found is None:
                found = Measured(*collect(self.target, self.draft, passage, self.settings.rows, self.settings.size))
                store.save(number, found)
            passages.append(passage)
            measured.append(found)
        return Data(passages, measured)

    def places(self, data: Data) -> list[tuple[Prefix, int]]:
        """Text and committed length of every window; reads the texts once more, since keys and values are not kept."""
        found = []
        for passage in tqdm(data.passages, desc="reading for simulation"):
            prefix = Prefix(self.target, passage.ids)
            found += [(prefix, n) for n in passage.lengths]
        return found

    def objective(self, data: Data) -> Objective:
        """The objective of the settings; needle ranks leave the split to captured mass."""
        if self.settings.objective == "kl":
            return Divergence(self.places(data), self.settings.rows, self.settings.size)
        return Mass(data.windows, self.settings.size)

    def choose(self, data: Data, fingerprints: dict[str, str]) -> Profile:
        """Choose history, then lookahead, then the split."""
        windows, settings = data.windows, self.settings
        objective, ranks = self.objective(data), data.ranks()
        history = self._history(objective, windows, ranks["target retrieval"])
        lookahead = self._lookahead(objective, windows, ranks["draft retrieval"])
        ahead = [score(w.lookahead, lookahead, self.draft.shape) for w in windows]
        back = [score(w.history, history, self.target.shape) for w in windows]
        share, value = choose_share(objective, ahead, back, settings.size, settings.trials, settings.seed)
        print(f"lookahead share {share:.2f}: {settings.objective} {value:.4f}", flush=True)
        return Profile(
            self.draft.shape, self.target.shape, lookahead, history, round(share, 4), "calibrated", fingerprints
        )

    def _history(self, objective: Objective, windows: list[Window], retrieval: torch.Tensor) -> Heads:
        """All heads of the one best target layer."""
        if self.settings.objective == "needle":
            layer = int(retrieval.sum(1).argmax())
        else:
            values = layer_values(objective, [w.history for w in tqdm(windows, desc="history layers")])
            layer = int(values.argmax())
        print(f"history: target layer {layer}", flush=True)
        return Heads(((layer, tuple(range(self.target.shape.heads))),))

    def _lookahead(self, objective: Objective, windows: list[Window], retrieval: torch.Tensor) -> Heads:
        """KV heads of the draft up to the cost; at least one."""
        draft, target, settings = self.draft.shape, self.target.shape, self.settings
        budget = settings.cost * 2 * target.layers * target.key_elements
        most = max(1, int(budget // draft.head_dim))
        candidates: list[Unit] = [(layer, head) for layer in range(draft.layers) for head in range(draft.kv_heads)]
        if settings.objective == "needle":
            return heads_of(by_rank(retrieval, draft, candidates, most), draft)
        with tqdm(total=most, desc="lookahead KV heads") as bar:
            steps = add_greedily(objective, [w.lookahead for w in windows], candidates, most, lambda step: _tick(bar))
        for step in steps:
            print(f"lookahead + draft layer {step.unit[0]}, KV head {step.unit[1]}: {step.value:.4f}", flush=True)
        return heads_of([step.unit for step in steps], draft)

    def evaluate(self, profile: Profile, data: Data) -> dict[str, Row]:
        """The table of the report."""
        named, windows = choosers(profile, auto_profile(self.draft.shape, self.target.shape)), data.windows
        places = self.places(data)
        with tqdm(total=len(windows), desc="simulating") as bar:
            return measure(named, windows, places, self.settings.rows, self.settings.size, lambda: _tick(bar))


def _tick(bar: Any) -> None:
    bar.update()
