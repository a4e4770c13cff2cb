"""Run SGLang without a GPU.

SGLang's CPU mode needs three things that PyPI does not give it: the package ``sgl_kernel``, a torchvision that loads,
and an attention backend that can verify drafts. The first two are in ``shims/``, found through the environment that
`enable` sets up; the third is registered by the plugin (`install`).

``python -m dustin_sglang.cpu MODULE [ARGS...]`` runs a command line of SGLang that way; programs call `enable` first::

    import dustin_sglang.cpu

    dustin_sglang.cpu.enable()
    import sglang as sgl
"""

import os
import platform
import sys
from pathlib import Path

__all__ = ["SHIMS", "enable"]

SHIMS = Path(__file__).resolve().parent / "shims"

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # The paged KV allocator is a Triton kernel; without a GPU only Triton's interpreter can run it.
    "TRITON_INTERPRET": "1",
    # On a machine that has a GPU, SGLang would otherwise take some of its CUDA paths as well.
    "CUDA_VISIBLE_DEVICES": "",
}


def enable() -> None:
    """Set this process, and those it starts, up for SGLang on the CPU. Call it before sglang is imported.

    Raises
    ------
    RuntimeError
        If sglang or triton is imported already: they have read the environment by then. Also on 64-bit ARM, where
        SGLang calls compiled operators while it starts.
    """
    if _enabled():
        return
    if platform.machine() in ("aarch64", "arm64"):
        raise RuntimeError("dustin_sglang.cpu needs x86-64: on ARM, SGLang's CPU mode calls compiled operators")
    imported = [name for name in ("sglang", "triton") if name in sys.modules]
    if imported:
        raise RuntimeError(
            f"dustin_sglang.cpu.enable() must run before {' and '.join(imported)} is imported; call it first in the "
            "program, or start the program with `python -m dustin_sglang.cpu`"
        )
    os.environ.update(_ENVIRONMENT)
    # SGLang compiles a few small functions; without this its first requests wait for, and need, a C++ compiler.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIMS), *([inherited] if inherited else [])])
    sys.path.insert(0, str(SHIMS))


def _enabled() -> bool:
    """Whether this process was set up by `enable`, or started by one that was."""
    return str(SHIMS) in sys.path and all(os.environ.get(name) == value for name, value in _ENVIRONMENT.items())
