"""The files of a checkpoint, read without loading a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors format


def local_folder(model: str) -> Path | None:
    """Return the folder of a model, or of a hub's model that is in the local cache already, or None."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a name of a hub either
        return None
    return Path(config).parent if isinstance(config, str) else None


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file in `folder`; empty where there are no safetensors files."""
    if (folder / INDEX).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return places
    return {
        name: file.name
        for file in sorted(folder.glob("*.safetensors"))
        for name in read_header(file)[0]
        if name[:2] != "__"
    }


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the byte where its tensors start.

    Raises
    ------
    ValueError
        The file is of another kind.
    """
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        if size > _HEADER_LIMIT:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, Any] = json.loads(data.read(size))
        return header, 8 + size
