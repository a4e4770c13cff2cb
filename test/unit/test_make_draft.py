"""The truncated draft equals its target cut by hand, and what cannot be cut is refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dustin_sglang.make_draft import main, make_draft

DEPTH = 5
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def write_target(folder: Path, model_type: str = "llama", shard: str = "1GB", **options: Any) -> Any:
    """Write a tiny random model, with tokenizer files beside it, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE, **options)).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_text("not to be copied")
    return model


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a fixed prompt."""
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 20)[None]).logits


@pytest.mark.parametrize("layers", [1, 3, DEPTH])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"max_window_layers": 4, "use_sliding_window": True, "sliding_window": 4}),
        ("qwen3", {}),
    ],
)
def test_logits_equal_the_target_cut_by_hand(
    tmp_path: Path, model_type: str, options: dict[str, Any], layers: int
) -> None:
    """The draft's logits are those of the target with its last layers removed."""
    target = write_target(tmp_path / "target", model_type, **options)
    whole = logits(target)
    draft = AutoModelForCausalLM.from_pretrained(make_draft(tmp_path / "target", layers, tmp_path / "draft")).eval()

    target.model.layers = target.model.layers[:layers]
    target.config.num_hidden_layers = layers
    assert torch.equal(logits(draft), logits(target))
    assert torch.equal(logits(draft), whole) == (layers == DEPTH)
    assert draft.config.num_hidden_layers == layers


def test_sharded_target(tmp_path: Path) -> None:
    """Shards that hold nothing the draft keeps vanish, and the new index is complete."""
    target = write_target(tmp_path / "target", shard="30KB", tie_word_embeddings=False)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 3
    out = make_draft(tmp_path / "target", 2, tmp_path / "draft")

    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {file.name for file in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert not any(".layers.2." in name for name in index["weight_map"])
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in files for tensor in load_file(out / file).values()
    )
    target.model.layers = target.model.layers[:2]
    target.config.num_hidden_layers = 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(target))


def test_keeps_dtype_and_copies_the_tokenizer(tmp_path: Path) -> None:
    """Weights keep their bytes; tokenizer files come along, other weights do not."""
    write_target(tmp_path / "target", dtype=torch.bfloat16)
    source = load_file(tmp_path / "target/model.safetensors")
    out = make_draft(tmp_path / "target", 1, tmp_path / "draft")
    kept = load_file(out / "model.safetensors")
    assert kept["model.norm.weight"].dtype == source["model.norm.weight"].dtype == torch.bfloat16
    assert all(torch.equal(tensor, source[name]) for name, tensor in kept.items())
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert (out / "chat_template.jinja").exists()
    assert not (out / "pytorch_model.bin").exists()


def test_config_lists_are_cut(tmp_path: Path) -> None:
    """Settings that have one entry a layer, or that count layers, follow the new depth."""
    write_target(tmp_path / "target", "qwen2", max_window_layers=4, use_sliding_window=True, sliding_window=4)
    whole = json.loads((tmp_path / "target/config.json").read_text())
    assert len(whole["layer_types"]) == DEPTH
    config = json.loads((make_draft(tmp_path / "target", 2, tmp_path / "draft") / "config.json").read_text())
    assert config["num_hidden_layers"] == config["max_window_layers"] == len(config["layer_types"]) == 2
    changed = {"num_hidden_layers", "max_window_layers", "layer_types"}
    assert {key for key in whole if whole[key] != config[key]} == changed


@pytest.mark.parametrize("layers", [0, -1, DEPTH + 1])
def test_layers_out_of_range(tmp_path: Path, layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the range, and nothing is written."""
    write_target(tmp_path / "target")
    assert main([str(tmp_path / "target"), "--layers", str(layers), str(tmp_path / "draft")]) == 1
    assert f"--layers {layers}: the target has {DEPTH} layers, choose 1 to {DEPTH}" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_existing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with files is kept as it is without --force; with it, no weight of the old model stays."""
    write_target(tmp_path / "target")
    write_target(tmp_path / "draft", shard="30KB")
    (tmp_path / "draft/notes.txt").write_text("mine")
    before = sorted(tmp_path.joinpath("draft").iterdir())
    command = [str(tmp_path / "target"), "--layers", "2", str(tmp_path / "draft")]
    assert main(command) == 1
    assert "is not empty; --force" in capsys.readouterr().err
    assert sorted(tmp_path.joinpath("draft").iterdir()) == before

    assert main([*command, "--force"]) == 0
    assert [file.name for file in tmp_path.glob("draft/*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "draft/notes.txt").read_text() == "mine"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.num_hidden_layers == 2


def test_never_onto_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--force does not overwrite the model that is being read, by whatever path."""
    write_target(tmp_path / "target")
    same = tmp_path / "target/../target"
    assert main([str(tmp_path / "target"), "--layers", "2", str(same), "--force"]) == 1
    assert "is the target itself" in capsys.readouterr().err
    assert (tmp_path / "target/config.json").exists()


def no_config(folder: Path) -> None:
    """Take the config away."""
    (folder / "config.json").unlink()


def other_type(folder: Path) -> None:
    """Claim another architecture."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))


def no_weights(folder: Path) -> None:
    """Take the safetensors away."""
    (folder / "model.safetensors").unlink()


def missing_shard(folder: Path) -> None:
    """Take a shard away that the index names."""
    shutil.rmtree(folder)
    write_target(folder, shard="30KB")
    next(folder.glob("model-00002-*")).unlink()


def shard_elsewhere(folder: Path) -> None:
    """Let the index name a file outside the folder."""
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_weights(folder: Path, drop: str = "-", **more: torch.Tensor) -> None:
    """Drop the tensors that start with `drop` and add `more`."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(drop)}
    save_file(kept | more, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, "it has no config.json"),
        (other_type, "model_type 'gpt_oss' is not supported"),
        (no_weights, "neither model.safetensors nor"),
        (missing_shard, "which is missing"),
        (shard_elsewhere, "names '../other.safetensors', which is not a file of this folder"),
        (lambda folder: edit_weights(folder, odd=torch.ones(1)), "unknown layout: odd"),
        (lambda folder: edit_weights(folder, "model.layers.3"), "layer 3 of 5 has no tensors"),
        (lambda folder: edit_weights(folder, "model.norm"), "model.norm.weight is missing"),
        (lambda folder: edit_weights(folder, "lm_head"), "lm_head.weight is missing"),
    ],
)
def test_refusals(tmp_path: Path, damage: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be cut is refused by name before anything is written."""
    write_target(tmp_path / "target", tie_word_embeddings=False)
    damage(tmp_path / "target")
    assert main([str(tmp_path / "target"), "--layers", "2", str(tmp_path / "draft")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()
