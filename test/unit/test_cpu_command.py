"""`enable` and ``python -m dustin_sglang.cpu``: the environment that SGLang, and processes it spawns, wake up in."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import dustin_sglang.cpu
from dustin_sglang.cpu import SHIMS

PROGRAM = """
import multiprocessing, os, sys

def look():
    import sgl_kernel, torchvision
    flags = (os.environ[name] for name in ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"))
    return sgl_kernel.__file__, torchvision.__file__, *flags

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(look)
    assert found == look(), found
    print(*found, *sys.argv[1:], sep="\\n")
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has neither been set up nor imported SGLang."""
    for name in ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "TORCH_COMPILE_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(SHIMS)])
    for name in ("sglang", "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return monkeypatch


def test_enabling_puts_the_shims_first(bare: pytest.MonkeyPatch) -> None:
    dustin_sglang.cpu.enable()
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == os.environ["TRITON_INTERPRET"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(SHIMS), "/somewhere"]
    assert sys.path[0] == str(SHIMS)


def test_enabling_twice_changes_nothing(bare: pytest.MonkeyPatch) -> None:
    dustin_sglang.cpu.enable()
    environment, path = dict(os.environ), list(sys.path)
    bare.setitem(sys.modules, "sglang", ModuleType("sglang"))
    dustin_sglang.cpu.enable()
    assert (dict(os.environ), sys.path) == (environment, path)


def test_what_the_user_chose_for_torch_compile_stays(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TORCH_COMPILE_DISABLE", "0")
    dustin_sglang.cpu.enable()
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0"


@pytest.mark.parametrize("imported", ["sglang", "triton"])
def test_enabling_too_late_is_an_error(bare: pytest.MonkeyPatch, imported: str) -> None:
    bare.setitem(sys.modules, imported, ModuleType(imported))
    with pytest.raises(RuntimeError, match=f"must run before {imported} is imported"):
        dustin_sglang.cpu.enable()
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_arm_is_refused(bare: pytest.MonkeyPatch) -> None:
    bare.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="x86-64"):
        dustin_sglang.cpu.enable()


def command(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in an environment that is not set up yet."""
    environment = {k: v for k, v in os.environ.items() if k not in ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET")}
    package = str(Path(dustin_sglang.cpu.__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, *([str(folder)] if folder else [])])
    program = [sys.executable, "-m", "dustin_sglang.cpu", *args]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)


def test_a_module_and_its_spawned_children_are_set_up(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = command("program", "--flag", "value", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    kernel, vision, *rest = done.stdout.split("\n")[:-1]
    assert Path(kernel).parents[1] == Path(vision).parents[1] == SHIMS
    assert rest == ["1", "1", "--flag", "value"]


def test_the_status_of_the_module_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(7)")
    assert command("program", folder=tmp_path).returncode == 7


@pytest.mark.parametrize("name", ["sglang", "sglang.cli.main"])
def test_a_command_runs_by_its_name_and_by_its_module(name: str) -> None:
    done = command(name, "version")
    assert done.returncode == 0, done.stderr
    assert f"sglang version: {version('sglang')}" in done.stdout


def test_no_module_is_an_error_and_help_is_not() -> None:
    missing, helped = command(), command("--help")
    assert (missing.returncode, helped.returncode) == (2, 0)
    assert "usage:" in missing.stderr and "usage:" in helped.stdout


@pytest.mark.parametrize("name", ["no.such.module", "nothing", "json"])
def test_an_unknown_module_is_named(name: str) -> None:
    """``json`` is a package without a program in it."""
    done = command(name)
    assert done.returncode == 2
    assert f"no module or command named {name!r}" in done.stderr


def test_the_stubs_satisfy_transformers() -> None:
    if str(SHIMS) not in sys.path:
        pytest.skip("needs SGLang's CPU engine")
    assert version("torchvision") == "0.0.0"
    from transformers.utils.import_utils import is_torchvision_available, is_vision_available

    assert is_torchvision_available() == is_vision_available()
    from torchvision.io import decode_jpeg

    with pytest.raises(NotImplementedError, match="text models only"):
        decode_jpeg(b"")
