"""The command from end to end on tiny models: its profile, its pictures, going on, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyLlama, write_llama
from transformers import AutoTokenizer

from dustin_sglang import profile
from dustin_sglang.calibrate.__main__ import main
from dustin_sglang.calibrate.calibration import Calibration
from dustin_sglang.calibrate.settings import Settings
from dustin_sglang.calibrate.store import Measured, Store
from dustin_sglang.calibrate.texts import Texts
from dustin_sglang.calibrate.trace import TracedModel
from dustin_sglang.fingerprint import fingerprint
from dustin_sglang.profile import ModelShape, auto_profile, find_profile, load_profile

TARGET = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=16)
DRAFT = ModelShape(layers=3, heads=6, kv_heads=3, head_dim=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``target`` and ``draft``, and two texts."""
    root = tmp_path_factory.mktemp("calibrate")
    write_llama(root / "target", TinyLlama())
    write_llama(root / "draft", TinyLlama(48, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, seed=4))
    for seed, name in enumerate(("a.txt", "b.txt")):
        draw = random.Random(seed)
        (root / name).write_text(" ".join(f"w{draw.randrange(3, 256)}" for _ in range(2000)))
    return root


def run(folder: Path, out: str, *more: str) -> int:
    arguments = {"target": "target", "draft": "draft", "text": "a.txt", "held-out": "b.txt", "out": out}
    paths = [part for flag, name in arguments.items() for part in (f"--{flag}", str(folder / name))]
    sizes = ["--windows", "4", "--context", "160", "--budget", "40", "--window", "8", "--trials", "4"]
    # The last one counts, so that a test may ask for equal weights, the default.
    return main([*paths, *sizes, "--cost", "0.2", "--device", "cpu", "--weights", "fit", *more])


@pytest.fixture(scope="module")
def made(folder: Path) -> dict[str, Any]:
    assert run(folder, "pair.json", "--resume", str(folder / "kept"), "--layer-groups", "2") == 0
    return json.loads((folder / "pair.json").read_text())


def test_it_writes_a_profile_that_loads_and_two_pictures(folder: Path, made: dict[str, Any]) -> None:
    loaded = load_profile(str(folder / "pair.json"), DRAFT, TARGET)
    assert len(loaded.history.layers) == 1 and 1 <= loaded.history.count <= 4
    # A fifth of the target's 256 elements of K and V is six KV heads of eight: two draft layers.
    assert 1 <= len(loaded.lookahead.layers) <= 2
    assert all(len(heads) == DRAFT.heads for _, heads in loaded.lookahead.by_layer)
    assert set(loaded.grouped_lookahead) == {2} and loaded.layer_groups == 2
    for picture in ("pair.heads.png", "pair.recall.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_the_profile_says_what_it_was_measured_on(folder: Path, made: dict[str, Any]) -> None:
    assert made["version"] == 1
    assert made["fingerprints"] == {role: fingerprint(str(folder / role)) for role in ("draft", "target")}
    measured = made["measured"]
    assert measured["objective"] == "kl" and measured["seed"] == 0 and measured["windows"] == 4
    assert measured["measured_on"] == "held-out: b"
    assert measured["weights"] == "fit" and measured["extra_step"] is True
    assert measured["held_back"]["windows"] == 2
    masses = measured["held_back"]["captured_mass"]
    assert masses.keys() == {"1 lists", "2 lists", "equal weights"} and all(0 < mass <= 1 for mass in masses.values())
    assert {"hybrid-sum, this profile", "hybrid-sum, 2 lists, this profile"} <= set(measured["table"])
    assert measured["table"]["oracle (one list)"]["captured_mass"] == 1
    assert set(measured["table"]["hybrid, this profile"]) == {"captured_mass", "agreement", "kl"}


def test_auto_finds_it_for_these_checkpoints_only(
    folder: Path, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "SHIPPED", tmp_path)
    (tmp_path / "pair.json").write_text(json.dumps(made))
    paths = {role: str(folder / role) for role in ("draft", "target")}
    assert find_profile(DRAFT, TARGET, paths).name == "pair"
    swapped = paths | {"draft": paths["target"]}
    assert find_profile(DRAFT, TARGET, swapped) == auto_profile(DRAFT, TARGET)


def test_going_on_gives_the_same_profile_without_reading_again(
    folder: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "kept" / "text" / "passage-001.safetensors").unlink()
    reads = []
    from dustin_sglang.calibrate import calibration

    collect = calibration.collect
    monkeypatch.setattr(calibration, "collect", lambda *args: reads.append(args) or collect(*args))
    assert run(folder, "again.json", "--layer-groups", "2", "--resume", str(folder / "kept")) == 0
    assert json.loads((folder / "again.json").read_text()) == made
    assert len(reads) == 1, "three of the four passages were kept"


def test_without_an_extra_step_passages_are_measured_again(
    folder: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "off.json", "--resume", str(folder / "kept"), "--extra-step", "off") == 1
    assert "was measured with other models, texts or settings" in capsys.readouterr().err
    assert run(folder, "off.json", "--extra-step", "off", "--objective", "mass") == 0
    assert json.loads((folder / "off.json").read_text())["measured"]["extra_step"] is False


def test_equal_weights_are_none_and_the_split_is_chosen(folder: Path, made: dict[str, Any]) -> None:
    assert Settings().weights == "equal"
    assert run(folder, "equal.json", "--resume", str(folder / "kept"), "--weights", "equal") == 0
    loaded = load_profile(str(folder / "equal.json"), DRAFT, TARGET)
    assert loaded.lookahead.weights is None and loaded.history.weights is None and loaded.history.count == 4
    assert 1 <= loaded.lookahead.count <= 6 * 2 and round(loaded.lookahead_share / 0.05, 6) % 1 == 0
    assert "held_back" not in loaded.measured and not loaded.grouped_lookahead and loaded.layer_groups == 1


def test_weights_of_fewer_draft_layers(folder: Path, made: dict[str, Any]) -> None:
    options = ["--resume", str(folder / "kept"), "--objective", "mass", "--draft-layers", "1"]
    assert run(folder, "one.json", *options) == 0
    assert len(load_profile(str(folder / "one.json"), DRAFT, TARGET).lookahead.layers) == 1


def test_captured_mass_makes_a_profile_too(folder: Path, made: dict[str, Any]) -> None:
    assert run(folder, "mass.json", "--resume", str(folder / "kept"), "--objective", "mass") == 0
    assert load_profile(str(folder / "mass.json"), DRAFT, TARGET).measured["objective"] == "mass"


@pytest.mark.parametrize("objective", ["kl", "mass"])
def test_groups_of_layers_get_a_history_layer_each(folder: Path, made: dict[str, Any], objective: str) -> None:
    options = ["--resume", str(folder / "kept"), "--objective", objective, "--weights", "equal"]
    assert run(folder, "groups.json", *options, "--layer-groups", "2", "4") == 0
    loaded = load_profile(str(folder / "groups.json"), DRAFT, TARGET)
    assert set(loaded.grouped_history) == {2, 4}
    first, second = loaded.grouped_history[2].layers
    assert first in (0, 1) and second in (2, 3)
    assert loaded.grouped_history[4].layers == (0, 1, 2, 3), "a group of one layer has no choice"
    assert loaded.measured["table"]["hybrid, 2 lists, this profile"]["kl"] > 0
    if objective == "kl":
        without = load_profile(str(folder / "pair.json"), DRAFT, TARGET)
        assert loaded.history == without.history, "what one list reads is chosen as without groups"


def test_retrieval_heads_need_a_model_that_answers(
    folder: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "refused.json", "--resume", str(folder / "kept"), "--objective", "needle") == 1
    assert "the draft answers none of the 1 questions about a needle" in capsys.readouterr().err


def test_retrieval_heads_choose_where_it_does(folder: Path) -> None:
    settings = Settings(windows=4, context=160, budget=40, window=8, trials=2, cost=0.05, objective="needle")
    models = [TracedModel(folder / role, "cpu", torch.float32) for role in ("target", "draft")]
    calibration = Calibration(*models, settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    data = calibration.read(Texts([folder / "a.txt"], tokenizer, 160, 5, 0), Store(None, {}), "text")
    target, draft = torch.zeros(4, 4), torch.zeros(3, 6)
    target[2, 1], draft[1, 5] = 0.9, 0.8
    answered = Measured(data.measured[1].windows, {"target": target, "draft": draft})
    chosen = calibration.choose(dataclasses.replace(data, measured=[data.measured[0], answered]), {})
    assert chosen.history.layers == (2,)
    assert chosen.lookahead.by_layer == ((1, (4, 5)),), "a twentieth of 256 elements is one KV head of eight"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layer-groups", "5"], "--layer-groups is 5; it must be from 2 to 4, the target's layers"),
        (["--layer-groups", "2", "1"], "--layer-groups is 1"),
        (["--windows", "6"], "--windows is 6; it must be a positive multiple of 4"),
        (["--rows", "1"], "--rows is 1; it must be at least 2"),
        (["--budget", "12"], "--budget is 12; it must be above --sinks plus --window, 12"),
        (["--budget", "150"], "--context is 160; it must be above 4/3 of --budget"),
        (["--context", "5000"], "--context is 5000; it must be at most 4087 for these models"),
        (["--context", "2500"], "give longer texts or a shorter --context"),
        (["--cost", "0"], "--cost is 0.0; it must be above 0 and at most 1"),
        (["--draft-layers", "0"], "--draft-layers is 0; it must be at least 1"),
        (["--trials", "0"], "--trials is 0; it must be at least 1"),
        (["--text", "/no/such.txt"], "/no/such.txt is not a file"),
        (["--out", "/no/such/folder/p.json"], "give the name of a .json file in a folder that exists"),
        (["--draft", "/no/model"], "/no/model is not a model folder"),
    ],
)
def test_bad_input_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(folder, "refused.json", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (folder / "refused.json").exists()


def test_a_draft_of_another_vocabulary_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_llama(folder / "other", TinyLlama(vocab_size=100))
    assert run(folder, "refused.json", "--draft", str(other)) == 1
    assert "has 100 tokens" in capsys.readouterr().err


def test_passages_of_other_settings_are_refused(
    folder: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "refused.json", "--resume", str(folder / "kept"), "--seed", "1") == 1
    assert "was measured with other models, texts or settings" in capsys.readouterr().err


def test_a_damaged_passage_is_refused(folder: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    damaged = folder / "damaged" / "text" / "passage-000.safetensors"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"torn")
    assert run(folder, "refused.json", "--resume", str(folder / "damaged")) == 1
    assert "is damaged" in capsys.readouterr().err


def test_it_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    assert run(folder, "refused.json") == 1
    assert "optuna missing: pip install 'dustin-sglang[calibrate]'" in capsys.readouterr().err
