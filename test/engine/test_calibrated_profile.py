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
    sizes += ["--weights", "fit", "--layer-groups", "2", "--draft-layers", "2"]
    assert main([*paths, *sizes, "--device", "cpu"]) == 0
    return out


def launch(arguments: dict[str, Any], shipped: str | None) -> dict[str, Any]:
    from dustin_sglang import profile

    if shipped is not None:
        profile.SHIPPED = Path(shipped)
    engine = Engine(**arguments)
    wiring, shapes, differ = engine.worker._wiring, set(), []
    select = wiring.selector.select

    def recorded(*args: Any, **options: Any) -> Any:
        selection = select(*args, **options)
        if selection.positions is not None:
            shapes.add(tuple(selection.positions.shape))
            differ.append(not selection.positions[0].equal(selection.positions[-1]))
        return selection

    wiring.selector.select = recorded
    answer = engine.generate({"r": PROMPT}, 12)["r"]
    used = wiring.profile
    heads = (used.lookahead.by_layer, used.history.by_layer)
    return dict(name=used.name, heads=heads, answer=answer, shapes=shapes, differ=any(differ))


def test_it_runs_by_file_and_auto_finds_it_by_fingerprint(models: dict[str, str], file: Path) -> None:
    by_file = in_child(launch, dustin(models), None, env=ENV | {"DUSTIN_PROFILE": str(file)})
    made = json.loads(file.read_text())
    assert {layer for layer, _ in by_file["heads"][0]} == {int(layer) for layer in made["lookahead"]}
    assert {layer for layer, _ in by_file["heads"][1]} == {int(layer) for layer in made["history"]}
    assert by_file["shapes"] == {(2, 1, 40)} and by_file["differ"], "each of the profile's two groups has its own list"
    found = in_child(launch, dustin(models), str(file.parent), env=ENV)
    assert found == by_file and found["name"] == "calibrated"


@pytest.mark.parametrize("options", [{}, {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}])
def test_a_budget_of_the_context_gives_the_dense_tokens(
    models: dict[str, str], file: Path, options: dict[str, int]
) -> None:
    dense = in_child(launch, dustin(models, **options), None, env=ENV | {"DUSTIN_POLICY": "dense"})
    whole = {"DUSTIN_BUDGET": "4096", "DUSTIN_WINDOW": "16", "DUSTIN_PROFILE": str(file)}
    assert in_child(launch, dustin(models, **options), None, env=whole)["answer"] == dense["answer"]


def test_one_list_where_the_launch_asks_for_one(models: dict[str, str], file: Path) -> None:
    env = ENV | {"DUSTIN_PROFILE": str(file), "DUSTIN_LAYER_GROUPS": "1"}
    assert in_child(launch, dustin(models), None, env=env)["shapes"] == {(1, 1, 40)}


def test_another_draft_falls_back_to_the_automatic_profile(models: dict[str, str], file: Path) -> None:
    assert in_child(launch, dustin(models, "eagle"), str(file.parent), env=ENV)["name"] == "auto"
