"""What the package may not do at all: unpickle, evaluate, open a port, add an endpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dustin_kernels
import dustin_sglang

PACKAGES = [Path(package.__file__ or "").parent for package in (dustin_sglang, dustin_kernels)]
FILES = [file for package in PACKAGES for file in package.rglob("*.py")]
UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SERVING = {"socket", "socketserver", "http", "fastapi", "uvicorn", "flask", "aiohttp", "zmq", "grpc"}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def called(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_unpickled_or_evaluated(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not {name.split(".")[0] for name in imported(tree)} & UNPICKLING
    for name, call in called(tree):
        assert name not in ("eval", "exec", "os.system", "torch.load", "torch.jit.load", "numpy.load", "np.load"), name
        assert all(not (word.arg == "shell" and ast.unparse(word.value) != "False") for word in call.keywords)


@pytest.mark.parametrize("file", [file for file in FILES if "demo" not in file.parts], ids=lambda file: file.name)
def test_only_the_demo_touches_the_network(file: Path) -> None:
    """The plugin opens no port and adds no endpoint, so nothing of it stands beside SGLang's API key.

    `models.py` fetches the demo's model through an ordinary client and serves nothing.
    """
    names = {name.split(".")[0] for name in imported(ast.parse(file.read_text()))}
    assert not names & SERVING


def test_no_hook_reaches_the_http_server() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    assert HookRegistry._hooks and not [target for target in HookRegistry._hooks if "entrypoints" in target]
