"""./run: which set-up steps run again, and what a failed one says. Nothing here touches the network."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Import the script, with its virtual environment in a temporary folder."""
    monkeypatch.setenv("DUSTIN_VENV", str(tmp_path / "venv"))
    monkeypatch.delenv("DUSTIN_TORCH_INDEX", raising=False)
    loader = importlib.machinery.SourceFileLoader("run_script", str(ROOT / "run"))
    spec = importlib.util.spec_from_loader("run_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_script", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def note(log: Path, word: str) -> list[str]:
    """Return a command that adds a word to a file."""
    return [sys.executable, "-c", f"open({str(log)!r}, 'a').write({word + ' '!r})"]


class Project:
    """Three steps, each of which depends on those before it and notes that it ran."""

    def __init__(self, run: ModuleType, folder: Path) -> None:
        self.run, self.folder, self.log = run, folder, folder / "log"
        self.input, self.output, self.last = folder / "input", folder / "output", "third"
        self.input.write_text("1")

    def set_up(self) -> list[str]:
        """Set up and return the steps that ran."""
        self.log.write_text("")
        make = [sys.executable, "-c", f"open({str(self.output)!r}, 'w')"]
        steps = [
            self.run.Step("first", [note(self.log, "first")], "-"),
            self.run.Step("second", [note(self.log, "second"), make], "-", [self.input], self.output),
            self.run.Step("third", [note(self.log, self.last)], "-"),
        ]
        self.run.set_up([self.run.Chain(self.folder / "stamps", steps)])
        return self.log.read_text().split()


@pytest.fixture
def project(run: ModuleType, tmp_path: Path) -> Project:
    """A project that has been set up once."""
    project = Project(run, tmp_path)
    assert project.set_up() == ["first", "second", "third"]
    return project


def test_nothing_runs_twice(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A second set-up does nothing, at once and in silence."""
    capsys.readouterr()
    start = time.monotonic()
    assert project.set_up() == []
    assert time.monotonic() - start < 0.5
    assert capsys.readouterr().out == ""


def test_a_changed_input_runs_its_step_and_the_following(project: Project) -> None:
    """What a step reads counts by content, and what comes later depends on it."""
    project.input.write_text("2")
    assert project.set_up() == ["second", "third"]
    project.input.touch()
    assert project.set_up() == []


def test_a_changed_command_runs_its_step(project: Project) -> None:
    """The code of a step is part of what it depends on."""
    project.last = "other"
    assert project.set_up() == ["other"]


def test_a_lost_output_runs_its_step_alone(project: Project) -> None:
    """A model that was deleted is made again."""
    project.output.unlink()
    assert project.set_up() == ["second"]


def test_other_interpreter_is_no_change(run: ModuleType) -> None:
    """A model that one virtual environment made is not made again by another."""
    step = [run.Step("s", [[python, "-m", "x"]], "-") for python in ("a/python", "b/python")]
    assert run.digest(step[0], "") == run.digest(step[1], "")
    assert run.digest(step[0], "") != run.digest(step[0], "before")


def test_failed_step_names_itself_and_the_remedy(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step, status, command, last lines and remedy are said; the step and those after it run the next time."""
    code = "print('line\\n' * 50 + 'the reason'); raise SystemExit(7)"
    log = tmp_path / "log"
    steps = [
        run.Step("good", [note(log, "good")], "-"),
        run.Step("bad", [[sys.executable, "-c", code]], "feed the cat"),
        run.Step("never", [note(log, "never")], "-"),
    ]
    for expected in ("good ", "good "):
        with pytest.raises(run.StepFailed) as caught:
            run.set_up([run.Chain(tmp_path / "stamps", steps)])
        message = str(caught.value)
        assert "step 'bad' failed with status 7" in message
        assert message.index("the reason") < message.index("remedy: feed the cat")
        assert message.count("line") < run.TAIL_LINES + 1
        assert log.read_text() == expected
    assert re.search(r"\[1/3\] good +\d+\.\d s", capsys.readouterr().out)


def test_missing_program_is_a_failed_step(run: ModuleType, tmp_path: Path) -> None:
    """A command that does not exist is reported like any other failure."""
    step = run.Step("bad", [[str(tmp_path / "no-such-program")]], "install it")
    with pytest.raises(run.StepFailed, match=r"(?s)step 'bad' failed.*no-such-program.*install it"):
        run.set_up([run.Chain(tmp_path / "stamps", [step])])


def test_main_exits_non_zero(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed step ends the program with its message on stderr and no traceback."""

    def fail(*args: object) -> None:
        raise run.StepFailed("step 'x' failed\n  remedy: y")

    monkeypatch.setattr(run, "set_up", fail)
    for command in ("setup", "test", "demo"):
        assert run.main([command]) == 1
        assert "./run: step 'x' failed\n  remedy: y" in capsys.readouterr().err


def test_old_python_is_refused(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version found and the versions wanted are named."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(run.StepFailed, match=r"this is 3\.9\.2\n.*3\.10 to 3\.13"):
        run.check_python()


def test_missing_venv_module_names_the_package(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's python3 comes without ensurepip."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(run.StepFailed, match="apt-get install python3-venv"):
        run.check_python()


def test_order_of_the_steps(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch comes first, SGLang without its requirements, the tests' packages only for the tests."""
    names = [step.name for chain in run.python_chains(dev=True) for step in chain.steps]
    assert names == [
        "virtual environment",
        "torch 2.13.0",
        "requirements/cpu.txt",
        "SGLang 0.5.17",
        "dustin-sglang",
        "requirements/dev.txt",
    ]
    steps = {step.name: step for chain in run.python_chains(dev=False) for step in chain.steps}
    assert "requirements/dev.txt" not in steps
    for name in ("SGLang 0.5.17", "dustin-sglang"):
        assert "--no-deps" in steps[name].commands[0]
    assert "--index-url" not in steps["torch 2.13.0"].commands[0]
    monkeypatch.setenv("DUSTIN_TORCH_INDEX", "file:///wheels")
    command = run.python_chains(dev=False)[1].steps[0].commands[0]
    assert command[command.index("--index-url") + 1] == "file:///wheels"


def test_an_existing_environment_is_kept(run: ModuleType) -> None:
    """DUSTIN_VENV may name an environment of the user's own: it is not made anew."""
    pip = run.VENV / "bin/pip"
    pip.parent.mkdir(parents=True)
    pip.touch()
    assert "virtual environment" not in [step.name for chain in run.python_chains(dev=False) for step in chain.steps]


def test_no_gpu_no_question(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no sign of a GPU, no interpreter is started to look for one."""
    monkeypatch.setattr(run.shutil, "which", lambda name: "/usr/bin/python3" if name == "python3" else None)
    monkeypatch.setattr(run.Path, "exists", lambda self: False)
    monkeypatch.setattr(run.subprocess, "run", lambda *args, **options: pytest.fail("asked"))
    assert run.gpu_python() is None


@pytest.mark.parametrize("works", [True, False])
def test_gpu_needs_a_working_sglang(run: ModuleType, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """With a GPU, python3 is taken if it imports SGLang and sees the GPU."""
    monkeypatch.setattr(run.shutil, "which", lambda name: f"/usr/bin/{name}")
    status = subprocess.CompletedProcess([], 0 if works else 1)
    monkeypatch.setattr(run.subprocess, "run", lambda *args, **options: status)
    assert run.gpu_python() == ("/usr/bin/python3" if works else None)


@pytest.mark.parametrize(("args", "makes_model"), [([], True), (["--model", "m", "--draft", "d"], False)])
def test_demo_hands_its_arguments_on(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, args: list[str], makes_model: bool
) -> None:
    """The demo runs in the virtual environment; the small model is made only when it is asked."""
    steps: list[str] = []
    executed: list[list[str]] = []
    monkeypatch.setattr(run, "gpu_python", lambda: None)
    monkeypatch.setattr(
        run, "set_up", lambda chains, environment: steps.extend(step.name for chain in chains for step in chain.steps)
    )
    monkeypatch.setattr(run.os, "execve", lambda python, command, environment: executed.append(command))
    run.demo([*args, "--budget", "256"])
    assert any(name.startswith("model ") for name in steps) == makes_model
    (command,) = executed
    assert command[:3] == [str(run.PYTHON), "-m", "dustin_sglang.demo"]
    assert command[-2:] == ["--budget", "256"]
    assert command.count("--model") == 1


def fake_phases(run: ModuleType, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int]) -> list[list[str]]:
    """Replace set-up and the phases of the tests; return the commands that are run."""
    commands: list[list[str]] = []

    def execute(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[2:])
        name = next((key for key in statuses if key in " ".join(command)), "")
        return subprocess.CompletedProcess(command, statuses.get(name, 0))

    monkeypatch.setattr(run, "set_up", lambda chains, environment=None: None)
    monkeypatch.setattr(run.subprocess, "run", execute)
    return commands


@pytest.mark.parametrize("broken", ["", "ruff check", "ruff format", "mypy", "test/unit", "test/server"])
def test_any_failed_phase_fails_the_tests(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    """All phases run whatever fails, and the table that ends the output says which did."""
    commands = fake_phases(run, monkeypatch, {broken: 1} if broken else {})
    assert run.test([]) == (1 if broken else 0)
    assert {command[0] for command in commands} == {"ruff", "mypy", "pytest"}
    assert not any("test/gpu" in command for command in commands)
    lines = capsys.readouterr().out.splitlines()
    assert sum("FAILED" in line for line in lines) == (1 if broken else 0)
    assert any(broken in line and "FAILED" in line for line in lines) == bool(broken)
    assert lines[-1].startswith("total")


def test_marks_paths_and_other_arguments(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """--slow changes the marks; paths replace the folders; the rest goes to pytest."""
    for args, paths, marks in (
        ([], "test/unit", "not gpu and not slow"),
        (["--slow", "test/unit/test_x.py::test_y", "-k", "run"], "test/unit/test_x.py::test_y", "not gpu"),
    ):
        commands = fake_phases(run, monkeypatch, {})
        run.test(args)
        pytest_commands = [command for command in commands if command[0] == "pytest"]
        assert pytest_commands[0][1] == paths
        assert pytest_commands[0][pytest_commands[0].index("-m") + 1] == marks
    assert len(pytest_commands) == 1
    assert pytest_commands[0][-2:] == ["-k", "run"]


def test_no_test_found_is_a_failure_unless_some_were_chosen(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest's status 5 is fine for one folder when -k chose tests of another."""
    fake_phases(run, monkeypatch, {"test/server": 5})
    assert run.test([]) == 1
    assert run.test(["-k", "unit"]) == 0


def test_help_and_unknown_commands() -> None:
    """--help names the commands and variables; anything else is an error."""
    answers = {
        argument: subprocess.run(
            [sys.executable, str(ROOT / "run"), argument], capture_output=True, text=True, check=False
        )
        for argument in ("--help", "tset")
    }
    assert answers["--help"].returncode == 0
    for word in ("demo", "test", "setup", "DUSTIN_VENV", "DUSTIN_TORCH_INDEX"):
        assert word in answers["--help"].stdout
    assert answers["tset"].returncode == 2
    assert "'tset'" in answers["tset"].stderr
    assert os.access(ROOT / "run", os.X_OK)


def test_every_requirement_is_pinned() -> None:
    """Each line of the requirement files names one exact version."""
    for name in ("cpu.txt", "dev.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            requirement = line.split("#")[0].strip()
            assert not requirement or re.match(r"^[a-z0-9-]+==[0-9a-z.]+( ; .+)?$", requirement), json.dumps(line)
