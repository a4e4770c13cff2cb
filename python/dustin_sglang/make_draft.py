"""Make a draft model out of the first layers of its target.

::

    python -m dustin_sglang.make_draft MODEL --layers N OUT

writes a model folder that keeps the embeddings, the first N decoder layers, the final norm and the head of MODEL, and
its tokenizer. No training takes place: such a self-draft lets anyone start who has no matching small model, and accepts
accordingly little. It serves any checkpoint with Llama's layout in safetensors, in one file or in shards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"model\.layers\.(\d+)\.")
SHARED = re.compile(r"(model\.embed_tokens|model\.norm|lm_head)\.")
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


class DraftError(ValueError):
    """The draft cannot be made; the message says what to change."""


def read_config(model: Path) -> dict[str, Any]:
    """Return the config of the folder `model`; raise DraftError where its layout is not known."""
    file = model / "config.json"
    if not file.is_file():
        raise DraftError(f"{model} is not a model folder: it has no config.json (a name on a hub is not looked up)")
    config: dict[str, Any] = json.loads(file.read_text())
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise DraftError(f"{model}: model_type {kind!r} is not supported (supported: {', '.join(MODEL_TYPES)})")
    return config


def find_tensors(model: Path) -> dict[str, str]:
    """Return the safetensors file of every tensor of the folder `model`, by the tensor's name."""
    if (model / INDEX).is_file():
        places: dict[str, str] = json.loads((model / INDEX).read_text())["weight_map"]
    elif (model / WEIGHTS).is_file():
        from safetensors import safe_open

        with safe_open(model / WEIGHTS, framework="pt") as weights:
            places = dict.fromkeys(weights.keys(), WEIGHTS)
    else:
        raise DraftError(f"{model}: neither {WEIGHTS} nor {INDEX} is there; convert the weights to safetensors first")
    for file in sorted(set(places.values())):
        if not isinstance(file, str) or Path(file).name != file:
            raise DraftError(f"{model}: {INDEX} names {file!r}, which is not a file of this folder")
        if not (model / file).is_file():
            raise DraftError(f"{model}: {INDEX} names {file}, which is missing")
    return places


def choose_tensors(places: dict[str, str], config: dict[str, Any], layers: int) -> dict[str, list[str]]:
    """Choose what the draft keeps.

    Parameters
    ----------
    places : dict of str to str
        File of every tensor of the target.
    config : dict
        The target's config.
    layers : int
        Number of layers to keep.

    Returns
    -------
    dict of str to list of str
        Names of the tensors to keep, by file, in order.

    Raises
    ------
    DraftError
        For a number of layers out of range, and for checkpoints that are incomplete or laid out otherwise.
    """
    depth = config["num_hidden_layers"]
    if not 1 <= layers <= depth:
        raise DraftError(f"--layers {layers}: the target has {depth} layers, choose 1 to {depth}")
    if odd := sorted(name for name in places if not LAYER.match(name) and not SHARED.match(name)):
        raise DraftError(
            f"unknown layout: {odd[0]} is neither a decoder layer, an embedding, the final norm nor the head"
        )
    missing = set(range(depth)) - {int(match[1]) for name in places if (match := LAYER.match(name))}
    if missing:
        raise DraftError(f"incomplete checkpoint: layer {min(missing)} of {depth} has no tensors")
    required = ["model.embed_tokens.weight", "model.norm.weight"]
    required += [] if config.get("tie_word_embeddings", False) else ["lm_head.weight"]
    for name in required:
        if name not in places:
            raise DraftError(f"incomplete checkpoint: {name} is missing")

    kept: dict[str, list[str]] = defaultdict(list)
    for name, file in sorted(places.items()):
        layer = LAYER.match(name)
        if layer is None or int(layer[1]) < layers:
            kept[file].append(name)
    return dict(sorted(kept.items()))


def truncate_config(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return `config` for a model of the first `layers` layers, per-layer settings included."""
    draft = {**config, "num_hidden_layers": layers}
    if isinstance(draft.get("layer_types"), list):
        draft["layer_types"] = draft["layer_types"][:layers]
    if isinstance(draft.get("max_window_layers"), int):
        draft["max_window_layers"] = min(draft["max_window_layers"], layers)
    return draft


def copy_weights(model: Path, out: Path, kept: dict[str, list[str]]) -> None:
    """Copy the `kept` tensors, one output file for each file that holds any: one at a time is in memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    size = 0
    for number, (file, names) in enumerate(kept.items(), 1):
        target = WEIGHTS if len(kept) == 1 else f"model-{number:05d}-of-{len(kept):05d}.safetensors"
        with safe_open(model / file, framework="pt") as weights:
            tensors = {name: weights.get_tensor(name) for name in names}
            save_file(tensors, out / target, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, target)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(kept) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def prepare_folder(model: Path, out: Path, force: bool) -> None:
    """Make the folder `out` ready, which is empty unless `force` allows to replace a model in it."""
    if out.resolve() == model.resolve():
        raise DraftError(f"{out} is the target itself")
    if out.exists() and not out.is_dir():
        raise DraftError(f"{out} is a file")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise DraftError(f"{out} is not empty; --force replaces the model in it")
        for old in [out / "config.json", out / INDEX, *out.glob("*.safetensors")]:
            old.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def make_draft(model: Path, layers: int, out: Path, force: bool = False) -> Path:
    """Write a draft of the first `layers` layers of the model in the folder `model`.

    Parameters
    ----------
    model : Path
        Hugging Face folder of the target, weights in safetensors.
    layers : int
        Number of decoder layers to keep, from 1 to all of them.
    out : Path
        Folder to write. Its config.json comes last: a folder that has one is complete.
    force : bool, default False
        Replace a model that is in `out` already.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    DraftError
        When a draft cannot be made; nothing was written then.
    """
    config = read_config(model)
    kept = choose_tensors(find_tensors(model), config, layers)
    prepare_folder(model, out, force)
    copy_weights(model, out, kept)
    for pattern in COMPANIONS:
        for file in model.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(truncate_config(config, layers), indent=2) + "\n")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m dustin_sglang.make_draft", description=description)
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the target model")
    parser.add_argument("--layers", type=int, required=True, metavar="N", help="number of layers to keep")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write the draft to")
    parser.add_argument("--force", action="store_true", help="replace a model that is in OUT already")
    args = parser.parse_args(argv)
    try:
        make_draft(args.model, args.layers, args.out, args.force)
    except DraftError as error:
        print(f"make_draft: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: a draft of the first {args.layers} layers of {args.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
