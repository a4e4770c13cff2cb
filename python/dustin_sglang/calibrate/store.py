"""Measured passages on disk, in safetensors: a later run with the same settings goes on from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dustin_sglang.calibrate.trace import CalibrationError
from dustin_sglang.calibrate.windows import Window

FORMAT = 3  # of the files; 1 had no attention of single layers, 2 no scores of single query heads
_FIELDS = tuple(field.name for field in fields(Window))


@dataclass(frozen=True)
class Measured:
    """What one passage gave.

    Attributes
    ----------
    windows
        Its windows.
    retrieval
        Retrieval masses float32 ``[layers, heads]`` by role; empty for prose.
    """

    windows: list[Window]
    retrieval: dict[str, torch.Tensor]


class Store:
    """A folder of measured passages.

    Parameters
    ----------
    folder
        Where they are kept; None keeps nothing.
    made_with
        What the measurements depend on; a passage of another make is refused.
    """

    def __init__(self, folder: Path | None, made_with: dict[str, object]) -> None:
        self._folder, self._made_with = folder, json.dumps({"format": FORMAT, **made_with}, sort_keys=True)

    def load(self, number: int) -> Measured | None:
        """Passage `number`, or None if it is not there.

        Raises
        ------
        CalibrationError
            It was made with other settings, or the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        file = self._file(number)
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as data:
                if (data.metadata() or {}).get("made_with") != self._made_with:
                    raise CalibrationError(
                        f"--resume: {file} was measured with other models, texts or settings, or by another release; "
                        "name another folder"
                    )
                return _unpack({name: data.get_tensor(name) for name in data.keys()})
        except SafetensorError as error:
            raise CalibrationError(f"--resume: {file} is damaged ({error}); remove it") from error

    def save(self, number: int, measured: Measured) -> None:
        """Keep passage `number`, whole or not at all."""
        from safetensors.torch import save_file

        file = self._file(number)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            save_file(_pack(measured), part, metadata={"made_with": self._made_with})
            part.replace(file)

    def _file(self, number: int) -> Path | None:
        return None if self._folder is None else self._folder / f"passage-{number:03d}.safetensors"


def _pack(measured: Measured) -> dict[str, torch.Tensor]:
    tensors = {f"{i}.{name}": getattr(w, name) for i, w in enumerate(measured.windows) for name in _FIELDS}
    tensors |= {f"retrieval.{role}": mass for role, mass in measured.retrieval.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _unpack(tensors: dict[str, torch.Tensor]) -> Measured:
    prefix = "retrieval."
    retrieval = {name[len(prefix) :]: mass for name, mass in tensors.items() if name.startswith(prefix)}
    count = (len(tensors) - len(retrieval)) // len(_FIELDS)
    windows = [Window(**{name: tensors[f"{i}.{name}"] for name in _FIELDS}) for i in range(count)]
    return Measured(windows, retrieval)
