"""The whole calibration of a pair: read passages, choose heads and split, measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from dustin_sglang.calibrate.evaluate import Row, choose_with, choosers, measure, recall_curve
from dustin_sglang.calibrate.objective import Divergence, Mass, Objective
from dustin_sglang.calibrate.search import (
    Unit,
    add_greedily,
    by_kv_head,
    by_rank,
    choose_share,
    heads_of,
    layer_values,
    score,
)
from dustin_sglang.calibrate.settings import Settings
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.store import Measured, Store
from dustin_sglang.calibrate.texts import Passage, Texts
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.calibrate.weights import fit_layers
from dustin_sglang.calibrate.windows import Window, collect
from dustin_sglang.profile import Profile, auto_profile
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups


@dataclass(frozen=True)
class Data:
    """Measured passages of one set of texts."""

    passages: list[Passage]
    measured: list[Measured]

    @property
    def windows(self) -> list[Window]:
        """All windows."""
        return [window for one in self.measured for window in one.windows]

    def held_back(self) -> tuple[list[Window], list[Window]]:
        """Windows to fit weights by, and those of the last passages, about a fifth of them, prose and needles."""
        pairs = len(self.measured) // 2
        held = 2 * max(1, round(pairs / 5)) if pairs > 1 else 1
        seen, unseen = self.measured[:-held], self.measured[-held:]
        return [w for one in seen for w in one.windows], [w for one in unseen for w in one.windows]

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
        passages, measured, s = [], [], self.settings
        for number in tqdm(range(s.passages), desc=f"reading {label}"):
            passage = texts.passage(number)
            found = store.load(number)
            if found is None:
                found = Measured(*collect(self.target, self.draft, passage, s.rows, s.size, s.extra_step))
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
        """Choose history, then lookahead, then the split; or the draft's layers and their weights for groups.

        Raises
        ------
        CalibrationError
            Retrieval heads are asked for, and a model answers no question about a needle.
        """
        windows, settings, ranks = data.windows, self.settings, data.ranks()
        for role in ("draft", "target") if settings.objective == "needle" else ():
            if not ranks[f"{role} retrieval"].any():
                raise CalibrationError(
                    f"--objective needle: the {role} answers none of the {settings.passages // 2} questions about a "
                    "needle; choose by kl or mass, or give more --windows or a shorter --context"
                )
        objective = self.objective(data)
        history = self._history(objective, windows, ranks["target retrieval"])
        if settings.weights == "fit":
            return self._fitted(data, history, fingerprints)
        lookahead = self._lookahead(windows, ranks["draft retrieval"])
        ahead = [score(w.lookahead, lookahead) for w in windows]
        back = [score(w.history, history) for w in windows]
        share, value = choose_share(objective, ahead, back, settings.size, settings.trials, settings.seed)
        _say(f"lookahead share {share:.2f}: {settings.objective} {value:.4f}")
        return Profile(
            self.draft.shape,
            self.target.shape,
            lookahead,
            history,
            round(share, 4),
            "calibrated",
            fingerprints,
            grouped_history={
                count: self._grouped_history(count, objective, windows, ranks["target retrieval"])
                for count in settings.layer_groups
            },
        )

    def _history(self, objective: Objective, windows: list[Window], retrieval: torch.Tensor) -> Heads:
        """All heads of the one best target layer."""
        if self.settings.objective == "needle":
            layer = int(retrieval.sum(1).argmax())
        else:
            values = layer_values(objective, tqdm([w.history for w in windows], desc="history layers"))
            layer = int(values.argmax())
        print(f"history: target layer {layer}", flush=True)
        return Heads(((layer, tuple(range(self.target.shape.heads))),))

    def _grouped_history(
        self, count: int, objective: Objective, windows: list[Window], retrieval: torch.Tensor
    ) -> Heads:
        """All heads of the best layer of each group, by what it does for that group alone."""
        groups, settings, best = LayerGroups(self.target.shape.layers, count), self.settings, list[int]()
        for group, layers in enumerate(groups.ranges):
            span = slice(layers.start, layers.stop)
            if settings.objective == "needle":
                values = retrieval[span].sum(1)
            else:
                judge: Objective = Mass(windows, settings.size, layers)
                if isinstance(objective, Divergence):
                    judge = objective.of_group(windows, groups, group)
                scores = tqdm([w.history[span] for w in windows], desc=f"history of group {group + 1} of {count}")
                values = layer_values(judge, scores)
            best.append(layers[int(values.argmax())])
        print(f"history of {count} groups: target layers {', '.join(map(str, best))}", flush=True)
        return Heads(tuple((layer, tuple(range(self.target.shape.heads))) for layer in best))

    def _fitted(self, data: Data, history: Heads, fingerprints: dict[str, str]) -> Profile:
        """All heads of some draft layers, what groups make of them, and what that captures in windows held back."""
        settings, draft, target = self.settings, self.draft.shape, self.target.shape
        (windows, unseen), most = data.held_back(), settings.draft_layers or max(1, self._most // draft.kv_heads)
        counts, rows = sorted({1, *settings.layer_groups}), settings.drafted
        groups = [LayerGroups(target.layers, count) for count in counts]
        found = fit_layers(windows, history, groups, settings.size, rows, most, str(self.target.device), _say)
        lookahead = Heads(tuple((layer, tuple(range(draft.heads))) for layer in found.layers))
        # One list by equal weights: those of one group are fitted to see what weights alone are worth.
        weights = {count: one for count, one in found.groups.items() if count > 1}
        profile = Profile(
            draft,
            target,
            lookahead,
            history,
            name="calibrated",
            fingerprints=fingerprints,
            grouped_lookahead=weights,
            layer_groups=counts[-1],
        )
        captured = {
            f"{count} lists": choose_with("hybrid-sum", one, rows, count)
            for count in counts
            for one in [profile if count > 1 else replace(profile, grouped_lookahead=found.groups)]
        } | {"equal weights": choose_with("hybrid-sum", profile, rows)}
        masses = {name: round(recall_curve(choose, unseen, [settings.size])[0], 4) for name, choose in captured.items()}
        _say(f"captured mass in {len(unseen)} windows held back: {masses}")
        return replace(profile, measured={"held_back": {"windows": len(unseen), "captured_mass": masses}})

    @property
    def _most(self) -> int:
        """Draft KV heads that the cost allows, at least one."""
        shape = self.target.shape
        return max(1, int(self.settings.cost * 2 * shape.layers * shape.key_elements // self.draft.shape.head_dim))

    def _lookahead(self, windows: list[Window], retrieval: torch.Tensor) -> Heads:
        """KV heads of the draft up to the cost, at least one; by captured mass unless retrieval heads are asked for.

        A greedy search by KL takes far longer and ends no better (docs/architecture.md).
        """
        draft, settings, most = self.draft.shape, self.settings, self._most
        candidates: list[Unit] = [(layer, head) for layer in range(draft.layers) for head in range(draft.kv_heads)]
        if settings.objective == "needle":
            return heads_of(by_rank(retrieval, draft, candidates, most), draft)
        with tqdm(total=most, desc="lookahead KV heads") as bar:
            scores = [by_kv_head(window.lookahead, draft) for window in windows]
            mass = Mass(windows, settings.size)
            steps = add_greedily(mass, scores, candidates, most, lambda step: _tick(bar))
        for step in steps:
            print(f"lookahead + draft layer {step.unit[0]}, KV head {step.unit[1]}: {step.value:.4f}", flush=True)
        return heads_of([step.unit for step in steps], draft)

    def evaluate(self, profile: Profile, data: Data) -> dict[str, Row]:
        """The table of the report."""
        automatic, windows = auto_profile(self.draft.shape, self.target.shape), data.windows
        named = choosers(profile, automatic, self.settings.drafted)
        places = self.places(data)
        with tqdm(total=len(windows), desc="simulating") as bar:
            return measure(named, windows, places, self.settings.rows, self.settings.size, lambda: _tick(bar))


def _tick(bar: Any) -> None:
    bar.update()


def _say(line: str) -> None:
    print(line, flush=True)
