"""The proposed changes to SGLang apply to the installed wheel and do what their headers say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "patches" / version("sglang")
PATCHES = sorted(FOLDER.glob("*.patch"))
SPECULATIVE = Path("sglang/srt/speculative")


def site_packages() -> Path:
    """Return the folder that the wheel is installed in."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def touched(patch: Path) -> list[Path]:
    """Return the files that a patch changes."""
    return [Path(name) for name in re.findall(r"^--- a/(\S+)$", patch.read_text(), re.MULTILINE)]


def apply(patch: Path, folder: Path) -> None:
    """Copy what `patch` changes from the installed wheel to `folder` and apply it there, without any fuzz."""
    for file in touched(patch):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_packages() / file, folder / file)
    if shutil.which("patch"):
        command = ["patch", "--fuzz=0", "--batch", "-p1", f"--input={patch}"]
    else:
        command = ["git", "apply", "-p1", str(patch)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offset" not in done.stdout, "the patch was made against another version"


def load(file: Path, name: str) -> ModuleType:
    """Import a file as a module of its own name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def callers(file: Path, called: str) -> set[str]:
    """Return the functions of a file that call the class or function named `called`."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == called
    }


def test_the_installed_version_has_patches() -> None:
    """Both patches exist, and each begins with its subject and its reason."""
    assert len(PATCHES) >= 2
    for patch in PATCHES:
        subject, reason = patch.read_text().split("--- a/", 1)[0].split("\n", 1)
        assert subject.startswith("Subject: [PATCH] ")
        assert "Without it: " in reason


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_applies_and_compiles(patch: Path, tmp_path: Path) -> None:
    """No hunk is off by a line or needs fuzz, and what results is Python that differs from what was there."""
    apply(patch, tmp_path)
    for file in touched(patch):
        ast.parse((tmp_path / file).read_text())
        assert (tmp_path / file).read_text() != (site_packages() / file).read_text()


def test_complete_custom_spec_algo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three methods are there, and an algorithm without one is refused when it registers, not later."""
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo as Stock

    missing = {"create_future_map", "carries_draft_hidden_states", "need_topk"}
    assert not missing & set(dir(Stock)), "SGLang has what the patch adds: drop it"
    apply(FOLDER / "0001-complete-custom-spec-algo.patch", tmp_path)
    monkeypatch.delitem(sys.modules, "patched_spec_registry", raising=False)
    patched = load(tmp_path / SPECULATIVE / "spec_registry.py", "patched_spec_registry")
    assert missing <= set(dir(patched.CustomSpecAlgo))

    eagle = type("Eagle", (patched.CustomSpecAlgo,), {"is_eagle": lambda self: True})
    patched.register_algorithm("eagle_like", supports_overlap=True, spec_class=eagle)(lambda args: object)
    registered = patched.get_spec("eagle_like")
    assert registered.need_topk() and registered.carries_draft_hidden_states()
    with pytest.raises(TypeError, match="create_future_map"):
        patched.register_algorithm("stock", spec_class=Stock)


def test_draft_worker_factory(tmp_path: Path) -> None:
    """Only the new method names the class of the draft worker, in both workers."""
    apply(FOLDER / "0002-draft-worker-factory.patch", tmp_path)
    for module, draft_worker in (
        ("eagle_worker_v2.py", "EagleDraftWorker"),
        ("standalone_worker_v2.py", "StandaloneDraftWorker"),
    ):
        assert callers(site_packages() / SPECULATIVE / module, draft_worker) == {"__init__"}
        assert callers(tmp_path / SPECULATIVE / module, draft_worker) == {"create_draft_worker"}
