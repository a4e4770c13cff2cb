"""A draft's folder is looked at before SGLang loads a byte of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TinyLlama, write_eagle, write_eagle3, write_llama

from dustin_sglang.draft_files import draft_faults

SHAPE = TinyLlama()
Weights = dict[str, torch.Tensor]


def faults(folder: Path, load_format: str = "auto", depth: int = SHAPE.num_layers, quantised: bool = False) -> str:
    return "\n".join(draft_faults(str(folder), load_format, depth, quantised))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "draft", SHAPE)


def rewrite(draft: Path, change: Callable[[Weights], Any]) -> None:
    weights = load_file(draft / "model.safetensors")
    change(weights)
    save_file(weights, draft / "model.safetensors")


def edit_header(draft: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = draft / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_whole_models_and_heads_are_well(tmp_path: Path, draft: Path) -> None:
    assert faults(draft) == ""
    assert faults(write_eagle(tmp_path / "eagle", SHAPE), depth=1) == ""
    assert faults(write_eagle3(tmp_path / "eagle3", SHAPE), depth=1) == ""


def test_what_is_not_there_or_has_no_weights_is_left_to_sglang(tmp_path: Path) -> None:
    assert faults(tmp_path / "no such folder") == faults(tmp_path) == ""


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "head.ckpt"])
def test_pickled_weights_are_refused(draft: Path, name: str) -> None:
    (draft / name).write_bytes(b"a pickle")
    assert faults(draft) == "", "SGLang takes the safetensors beside it"
    (draft / "model.safetensors").unlink()
    assert f"{name} is pickled, which can run code; convert it to safetensors" in faults(draft)


@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_formats_that_unpickle_are_refused(draft: Path, load_format: str) -> None:
    assert "reads pickled files; use safetensors" in faults(draft, load_format)


def test_other_formats_have_no_such_files(draft: Path) -> None:
    (draft / "model.safetensors").write_bytes(b"x")
    assert faults(draft, "dummy") == ""


def test_a_layer_without_weights_is_refused(draft: Path) -> None:
    """SGLang would draft with whatever its memory holds."""
    rewrite(draft, lambda weights: [weights.pop(name) for name in list(weights) if ".layers.2." in name])
    assert "has no weights of layer 2 of 4; copy all of its files" in faults(draft)


def test_layers_of_another_name_are_not_missed(draft: Path) -> None:
    for other in ("transformer.h.", "blocks.", "sections."):
        weights = load_file(draft / "model.safetensors")
        prefix = next(name[: name.index("0.self_attn")] for name in weights if "0.self_attn" in name)
        save_file({name.replace(prefix, other): w for name, w in weights.items()}, draft / "model.safetensors")
        assert faults(draft) == ""


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_a_type_that_needs_a_scale_are_refused_without_one(draft: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(draft, lambda weights: weights.update({name: weights[name].to(dtype)}))
    assert f"{name} is of type" in faults(draft) and "use F64, F32, F16, BF16" in faults(draft)
    assert faults(draft, quantised=True) == ""


@pytest.mark.parametrize("keep", [4, 100, 100_000])
def test_a_file_that_is_cut_short_is_refused(draft: Path, keep: int) -> None:
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "copy it again" in faults(draft)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**9, 10**9]},
        {"shape": [-1, 64]},
        {"shape": [True, 64]},
        {"shape": "64"},
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [64, 0]},
        {"data_offsets": [0]},
        {"dtype": "F4096"},
        {"dtype": ["F32"]},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(draft: Path, change: dict[str, Any]) -> None:
    edit_header(draft, lambda header: header["model.norm.weight"].update(change))
    assert faults(draft)


def test_a_header_of_absurd_size_is_not_read(draft: Path) -> None:
    (draft / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert "is no safetensors file" in faults(draft)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_names_files_of_its_folder_alone(draft: Path, file: str) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names {file!r}, which is no safetensors file of its folder" in faults(draft)
