"""``python -m dustin_sglang.cpu MODULE [ARGS...]``: run a command of SGLang without a GPU."""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

from dustin_sglang.cpu import enable

USAGE = """usage: python -m dustin_sglang.cpu MODULE [ARGS...]

Runs a Python module or an installed command as the main program, set up for SGLang without a GPU:

  python -m dustin_sglang.cpu sglang serve --model-path MODEL --dtype float32
  python -m dustin_sglang.cpu sglang.launch_server --model-path MODEL --dtype float32
  python -m dustin_sglang.cpu sglang.bench_serving --port 30000
"""


def main(argv: list[str]) -> int:
    """Set the process up and run the module.

    Parameters
    ----------
    argv : list of str
        Module or command name, then its arguments.

    Returns
    -------
    int
        Exit status: 2 if there is nothing to run, else that of the module.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr, end="")
        return 0 if argv else 2
    enable()
    name = argv[0]
    command = _command(name)
    if command is None and not _is_runnable(name):
        print(f"python -m dustin_sglang.cpu: no module or command named {name!r}\n\n{USAGE}", file=sys.stderr, end="")
        return 2
    sys.argv = list(argv)
    if command is not None:
        status = command()
        return status if isinstance(status, int) else 0
    # As "__main__" in sys.modules, with the module's own spec, so that spawned processes import that module again as
    # they would after `python -m MODULE`.
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _command(name: str) -> Callable[[], object] | None:
    """Installed command of that name, or whose function is in the module of that name.

    ``sglang.cli.main`` is such a module: it only defines its entry point, so running it as a program would do nothing.
    """
    found = [e for e in entry_points(group="console_scripts") if name in (e.name, e.module)]
    return found[0].load() if found else None


def _is_runnable(name: str) -> bool:
    """Whether ``python -m name`` would find something to run."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        return False
    return spec is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
