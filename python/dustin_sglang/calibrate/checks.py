"""Refuses what cannot be calibrated, before anything is read; each message names flag, value and range."""

from __future__ import annotations

from pathlib import Path

from dustin_sglang.calibrate.settings import Settings
from dustin_sglang.calibrate.texts import WINDOW_DISTANCE, WINDOWS_A_PASSAGE
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel


def check_settings(settings: Settings) -> None:
    """Check numbers.

    Raises
    ------
    CalibrationError
        One is out of its range.
    """
    each = 2 * WINDOWS_A_PASSAGE
    good = settings.windows > 0 and settings.windows % each == 0
    require("--windows", settings.windows, good, f"a positive multiple of {each}: prose and needles take turns")
    require("--rows", settings.rows, settings.rows >= 2, "at least 2")
    require("--sinks", settings.sinks, settings.sinks >= 0, "at least 0")
    require("--window", settings.window, settings.window >= 0, "at least 0")
    free = settings.sinks + settings.window
    require("--budget", settings.budget, settings.budget > free, f"above --sinks plus --window, {free}")
    shortest = settings.context - settings.context // 4
    require("--context", settings.context, shortest > settings.budget, "above 4/3 of --budget, to leave a choice")
    require("--cost", settings.cost, 0 < settings.cost <= 1, "above 0 and at most 1")
    layers = settings.draft_layers
    require("--draft-layers", layers, layers is None or layers >= 1, "at least 1")
    require("--trials", settings.trials, settings.trials >= 1, "at least 1")


def check_files(texts: list[Path], out: Path) -> None:
    """Check paths.

    Raises
    ------
    CalibrationError
        A text is missing, or the result has nowhere to go.
    """
    for file in texts:
        if not file.is_file():
            raise CalibrationError(f"{file} is not a file; --text and --held-out take text files")
    if not out.parent.is_dir() or out.suffix != ".json":
        raise CalibrationError(f"--out {out}: give the name of a .json file in a folder that exists")


def check_context(target: TracedModel, draft: TracedModel, settings: Settings) -> None:
    """Check that both models take the context.

    Raises
    ------
    CalibrationError
        One does not.
    """
    beyond = (WINDOWS_A_PASSAGE - 1) * WINDOW_DISTANCE + settings.rows
    most = min(target.max_tokens, draft.max_tokens) - beyond
    require("--context", settings.context, settings.context <= most, f"at most {most} for these models")


def check_groups(target: TracedModel, settings: Settings) -> None:
    """Check that the target's layers can fall into so many groups.

    Raises
    ------
    CalibrationError
        They cannot.
    """
    most = target.shape.layers
    for count in settings.layer_groups:
        require("--layer-groups", count, 2 <= count <= most, f"from 2 to {most}, the target's layers")


def check_vocabulary(target: TracedModel, draft: TracedModel) -> None:
    """Check that the draft speaks the target's vocabulary.

    Raises
    ------
    CalibrationError
        It does not.
    """
    if target.vocab_size != draft.vocab_size:
        raise CalibrationError(
            f"--draft {draft.path} has {draft.vocab_size} tokens, --target {target.path} {target.vocab_size}: a draft "
            "has the target's vocabulary"
        )


def require(flag: str, value: object, good: bool, allowed: str) -> None:
    """Raise CalibrationError, which names flag, value and range, unless the value is good."""
    if not good:
        raise CalibrationError(f"{flag} is {value}; it must be {allowed}")
