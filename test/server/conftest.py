"""Servers that the tests of this folder share: one a configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launch import DRAFT, TARGET
from serving import ON_CPU, Server, serve, small_budget
from tiny_models import TinyLlama, write_eagle, write_llama

# What SGLang refuses by itself without these flags; with them the answer is ours.
ALLOW = ("--enable-return-hidden-states", "--enable-custom-logit-processor")


# On a GPU heads are as large as FlashInfer's kernels take them, and the best token leads by far more than bf16 rounds:
# among the greedy answers of these tests by 1.4 nats and more.
GPU_TARGET = TinyLlama(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, bigram=1.0)
GPU_DRAFT = TinyLlama(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, seed=100, bigram=1.0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny target, a whole-model draft of another shape and an EAGLE head."""
    root = tmp_path_factory.mktemp("tiny")
    target, draft = (TARGET, DRAFT) if ON_CPU else (GPU_TARGET, GPU_DRAFT)
    folders = {
        "target": write_llama(root / "target", target),
        "draft": write_llama(root / "draft", draft),
        "eagle": write_eagle(root / "eagle", target),
    }
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def server(tiny: dict[str, str]) -> Iterator[Server]:
    """A whole-model draft, through ``sglang.launch_server``."""
    with serve(*small_budget(tiny), "--enable-metrics", "--decode-log-interval", "4", *ALLOW) as running:
        running.compile_samplers()
        yield running


@pytest.fixture(scope="session")
def head_server(tiny: dict[str, str]) -> Iterator[Server]:
    """Dustin with an EAGLE head and its default tree, through ``sglang serve``."""
    arguments = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["eagle"]]
    arguments += ["--speculative-algorithm", "dustin", "--dustin-budget", "100", "--max-total-tokens", "8192", *ALLOW]
    with serve(*arguments, module="sglang.cli.main serve") as running:
        running.compile_samplers()
        yield running


@pytest.fixture(params=["server", "head_server"])
def either(request: pytest.FixtureRequest) -> Server:
    """One server after the other: a whole-model draft in chains, an EAGLE head in trees."""
    return request.getfixturevalue(request.param)
