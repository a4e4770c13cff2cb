"""Selection policies, one a file. `POLICIES` finds every module of this folder; see CONTRIBUTING.md."""

from __future__ import annotations

import importlib
import pkgutil

from dustin_sglang.selection.policies.base import Budget, Policy

__all__ = ["POLICIES", "Budget", "Policy"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def _subclasses(cls: type[Policy]) -> list[type[Policy]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


POLICIES: dict[str, type[Policy]] = {c.name: c for c in _subclasses(Policy) if hasattr(c, "name")}
