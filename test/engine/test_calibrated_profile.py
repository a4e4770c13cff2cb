"""A profile that the calibration command made runs in a launch, by file and by fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang.calibrate.__main__ import main

PROMPT = tokens(150, seed=1)
ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16"}


@pytest.fixture(scope="module")
def file(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("profile")
    text, out = root / "text.txt", root / "calibrated.json"
    text.write_text(" ".join(f"w{token}" for token in tokens(2000, seed=7)))
    paths = ["--target", models["target"], "--draft", models["standalone"], "--text", str(text), "--out", str(out)]
    sizes = ["--windows", "4", "--context", "160", "--budget", "40", "--window", "8", "--objective", "mass"]
    assert main([*paths, *sizes, "--device", "cpu"]) == 0
    return out


def launch(arguments: dict[str, Any], shipped: str | None) -> dict[str, Any]:
    from dustin_sglang import profile

    if shipped is not None:
        profile.SHIPPED = Path(shipped)
    engine = Engine(**arguments)
    wiring = engine.worker._wiring
    answer = engine.generate({"r": PROMPT}, 12)["r"]
    used = wiring.profile
    return dict(name=used.name, heads=(used.lookahead.by_layer, used.history.by_layer), answer=answer)


def test_it_runs_by_file_and_auto_finds_it_by_fingerprint(models: dict[str, str], file: Path) -> None:
    by_file = in_child(launch, dustin(models), None, env=ENV | {"DUSTIN_PROFILE": str(file)})
    made = json.loads(file.read_text())
    assert {layer for layer, _ in by_file["heads"][0]} == {int(layer) for layer in made["lookahead"]}
    assert {layer for layer, _ in by_file["heads"][1]} == {int(layer) for layer in made["history"]}
    found = in_child(launch, dustin(models), str(file.parent), env=ENV)
    assert found == by_file and found["name"] == "calibrated"


def test_another_draft_falls_back_to_the_automatic_profile(models: dict[str, str], file: Path) -> None:
    assert in_child(launch, dustin(models, "eagle"), str(file.parent), env=ENV)["name"] == "auto"
