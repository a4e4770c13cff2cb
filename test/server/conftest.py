"""Servers that the tests of this folder share: one a configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launch import DRAFT, TARGET
from serving import Server, serve
from tiny_models import write_eagle, write_llama

BUDGET = 64
# What SGLang refuses by itself without these flags; with them the answer is ours.
ALLOW = ("--enable-return-hidden-states", "--enable-custom-logit-processor")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny target, a whole-model draft of another shape and an EAGLE head."""
    root = tmp_path_factory.mktemp("tiny")
    folders = {
        "target": write_llama(root / "target", TARGET),
        "draft": write_llama(root / "draft", DRAFT),
        "eagle": write_eagle(root / "eagle", TARGET),
    }
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def server(tiny: dict[str, str]) -> Iterator[Server]:
    """Dustin with a budget that most prompts of these tests exceed, through ``sglang.launch_server``."""
    arguments = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["draft"]]
    arguments += ["--speculative-algorithm", "dustin", "--dustin-budget", str(BUDGET), "--dustin-window", "16"]
    arguments += ["--max-total-tokens", "8192", "--enable-metrics", "--decode-log-interval", "4", *ALLOW]
    with serve(*arguments) as running:
        yield running


@pytest.fixture(scope="session")
def head_server(tiny: dict[str, str]) -> Iterator[Server]:
    """Dustin with an EAGLE head and its default tree, through ``sglang serve``."""
    arguments = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["eagle"]]
    arguments += ["--speculative-algorithm", "dustin", "--dustin-budget", "100", "--max-total-tokens", "4096", *ALLOW]
    with serve(*arguments, module="sglang.cli.main serve") as running:
        yield running
