"""Tests run on SGLang's CPU engine unless they need a GPU; the environment must say so before SGLang is imported."""

import os

import pytest

if os.environ.get("DUSTIN_TEST_DEVICE", "cpu") == "cpu":
    import dustin_sglang.cpu

    dustin_sglang.cpu.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and DUSTIN_TEST_DEVICE=cuda"))
