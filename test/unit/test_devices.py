"""Which of the two kernels verifies on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dustin_kernels.attend import MAX_TREE_ROWS
from dustin_sglang import devices
from dustin_sglang.config import ConfigError, DustinConfig

KERNEL, FLASHINFER = "DustinAttendBackend", "DustinFlashInferBackend"


def runner(topk: int, tokens: int) -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(speculative_eagle_topk=topk, speculative_num_draft_tokens=tokens)
    )


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends are their names, since they cannot be imported without FlashInfer; the kernel takes the model."""
    for module, name in (("attend_backend", KERNEL), ("verify_backend", FLASHINFER)):
        stand_in = ModuleType(module)
        setattr(stand_in, name, name)
        monkeypatch.setitem(sys.modules, f"dustin_sglang.{module}", stand_in)
    monkeypatch.setattr(devices, "why_not_attend", lambda model_runner: None)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("topk", "tokens", "chosen"),
    [(8, MAX_TREE_ROWS, KERNEL), (8, MAX_TREE_ROWS + 1, FLASHINFER), (1, MAX_TREE_ROWS + 1, KERNEL)],
    ids=["the largest tree", "a larger tree", "a longer chain"],
)
def test_auto_leaves_trees_that_the_kernel_cannot_mask_to_flashinfer(topk: int, tokens: int, chosen: str) -> None:
    assert devices._verify_backend_class(DustinConfig(), runner(topk, tokens), dense=False) == chosen
    assert devices._verify_backend_class(DustinConfig(), runner(topk, tokens), dense=True) == FLASHINFER


@pytest.mark.usefixtures("on_a_gpu")
def test_the_kernel_is_refused_for_a_tree_that_it_cannot_mask() -> None:
    with pytest.raises(
        ConfigError, match="--dustin-attention dustin .*trees of up to 64 tokens, not 65; use flashinfer"
    ):
        devices._verify_backend_class(DustinConfig(attention="dustin"), runner(8, 65), dense=False)
