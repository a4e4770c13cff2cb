"""Tiny models shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import DRAFT, TARGET
from tiny_models import write_eagle, write_eagle3, write_llama


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders: a target, a whole-model draft of another shape, an EAGLE and an EAGLE-3 head."""
    root: Path = tmp_path_factory.mktemp("models")
    folders = {
        "target": write_llama(root / "target", TARGET),
        "standalone": write_llama(root / "standalone", DRAFT),
        "eagle": write_eagle(root / "eagle", TARGET),
        "eagle3": write_eagle3(root / "eagle3", TARGET),
    }
    return {name: str(folder) for name, folder in folders.items()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker has one of them left at the end."""
    items.sort(key=lambda item: item.path.stem not in ("test_demo_case", "test_long_chat", "test_exactness_ladder"))
