"""Is a draft's folder plain, whole and of the shape that its config states? Only headers are read.

SGLang would unpickle a checkpoint without safetensors, and leave the weights of a layer that has no tensors as they
were allocated: the draft then drafts noise, chooses lists by noise, and nothing says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dustin_sglang.checkpoint import INDEX, read_header, tensor_files

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PICKLED_FORMATS = ("pt", "npcache")
# Formats whose weights are such files; others have none (dummy), or none here.
_FORMATS = ("auto", "safetensors", "fastsafetensors", "mistral", "layered")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHERS = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")  # of Llama and most others, GPT-2, MPT
_HEAD_LAYER = re.compile(r"(?:^|\.)midlayer\.")


def draft_faults(model: str, load_format: str, depth: int, quantised: bool) -> Iterator[str]:
    """Say what is wrong with a draft's files and what to do instead.

    Parameters
    ----------
    model
        ``--speculative-draft-model-path``; what is no folder is left to SGLang.
    load_format
        The draft's load format.
    depth
        Layers that its config states.
    quantised
        Whether its config states a quantisation.
    """
    if load_format in _PICKLED_FORMATS:
        yield f"load format {load_format} is not supported for the draft: it reads pickled files; use safetensors"
    folder = Path(model)
    if load_format not in _FORMATS or not folder.is_dir():
        return
    try:
        places = tensor_files(folder)
        odd = list(_odd_files(folder, places))
        yield from odd
        if odd or not places:
            return
        headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
        for file, (header, start) in headers.items():
            yield from _tensors(folder / file, header, start, quantised)
        yield from _layers(folder, places, depth)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"the draft's files in {folder} cannot be read ({error}); copy it again"


def _odd_files(folder: Path, places: dict[str, str]) -> Iterator[str]:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled and not places:
        yield f"the draft's {pickled[0]} is pickled, which can run code; convert it to safetensors"
    for file in sorted(set(places.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            yield f"the draft's {INDEX} names {file!r}, which is no safetensors file of its folder; copy it again"


def _tensors(file: Path, header: dict[str, Any], start: int, quantised: bool) -> Iterator[str]:
    """Types, and sizes against the ranges of bytes that the tensors have in the file."""
    sizes = _FLOATS | _OTHERS
    end = file.stat().st_size - start
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, last) = about["dtype"], about["shape"], about["data_offsets"]
        if dtype not in sizes or (name.endswith("weight") and dtype not in _FLOATS and not quantised):
            yield f"the draft's {name} is of type {dtype}, which its config does not explain; use {', '.join(_FLOATS)}"
        elif not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            yield f"the draft's {file.name} is damaged at {name}; copy it again"
        elif last - first != math.prod(shape) * sizes[dtype] or last > end:
            yield f"the draft's {file.name} is damaged or cut short at {name}; copy it again"


def _layers(folder: Path, places: dict[str, str], depth: int) -> Iterator[str]:
    found = {int(match[1]) for name in places if (match := _LAYER.search(name))}
    found |= {0} if any(_HEAD_LAYER.search(name) for name in places) else set()
    missing = sorted(set(range(depth)) - found)
    if found and missing:  # none found at all: layers of another name
        yield f"the draft in {folder} has no weights of layer {missing[0]} of {depth}; copy all of its files"
