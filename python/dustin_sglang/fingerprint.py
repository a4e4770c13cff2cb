"""Which checkpoint is this? A short hash of what a profile depends on, read in milliseconds.

It covers the fields of the config that shape attention and some bytes of a few tensors, spread over the checkpoint by
name. A fine-tune, a quantised or a converted copy has another fingerprint: its profile has to be asked for by file.
Copies that differ only in how the weights are split over files have the same one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dustin_sglang.checkpoint import local_folder, read_header, tensor_files

_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_TENSORS = 8
_BYTES = 4096


def fingerprint(model: str) -> str | None:
    """Fingerprint of the checkpoint in a folder, or of a hub's model that is already in the local cache.

    Returns
    -------
    str or None
        16 hexadecimal digits; None where there are no safetensors weights to read.
    """
    folder = local_folder(model)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        hashed = hashlib.sha256(json.dumps([config.get(name) for name in _FIELDS]).encode())
        places = tensor_files(folder)
        names = sorted(places)
        for name in names[:: max(1, len(names) // _TENSORS)]:
            hashed.update(name.encode() + _first_bytes(folder / places[name], name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # another kind of checkpoint: nothing to recognise it by
    return hashed.hexdigest()[:16] if names else None


def _first_bytes(file: Path, name: str) -> bytes:
    header, start = read_header(file)
    about = header[name]
    begin, end = about["data_offsets"]
    with file.open("rb") as data:
        data.seek(start + begin)
        return json.dumps([about["dtype"], about["shape"]]).encode() + data.read(min(end - begin, _BYTES))
