"""A fingerprint tells checkpoints apart and does not depend on how they are stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import TinyLlama, write_llama

from dustin_sglang.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", TinyLlama(num_layers=2))


def test_copies_have_the_same_and_other_models_another(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(str(tmp_path / "copy")) == fingerprint(str(model))
    other = write_llama(tmp_path / "other", TinyLlama(num_layers=2, seed=1))
    deeper = write_llama(tmp_path / "deeper", TinyLlama(num_layers=3))
    assert len({fingerprint(str(folder)) for folder in (model, other, deeper)}) == 3


def test_another_type_of_the_weights_is_another_checkpoint(model: Path) -> None:
    before = fingerprint(str(model))
    weights = load_file(model / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, model / "model.safetensors")
    assert fingerprint(str(model)) != before


def test_shards_do_not_matter(model: Path) -> None:
    before = fingerprint(str(model))
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, model / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(str(model)) == before


def test_what_has_no_safetensors_has_none(tmp_path: Path, model: Path) -> None:
    assert fingerprint("no-such/model") is None and fingerprint(str(tmp_path / "none")) is None
    (model / "model.safetensors").write_bytes(b"not a checkpoint")
    assert fingerprint(str(model)) is None
