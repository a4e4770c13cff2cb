"""The entry point: idempotent, and a failure surfaces where the algorithm is used."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dustin_sglang import compat, plugin


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})


def test_registering_twice_changes_nothing() -> None:
    plugin.register()
    first = SpeculativeAlgorithm.from_string("dustin")
    plugin.register()
    assert SpeculativeAlgorithm.from_string("DUSTIN") is first
    assert registered_radix_cache_backends().count("dustin") == 1


def test_the_algorithm_answers_every_question_that_sglang_asks() -> None:
    plugin.register()
    algorithm = SpeculativeAlgorithm.from_string("dustin")
    for name, member in vars(SpeculativeAlgorithm).items():
        if callable(member) and not name.startswith("_") and name not in ("from_string", "register"):
            assert callable(getattr(algorithm, name, None)), f"the algorithm has no {name}"


@pytest.mark.usefixtures("clean_registry")
def test_another_sglang_is_refused_by_name_when_the_algorithm_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.4.9")
    plugin.register()
    with pytest.raises(RuntimeError, match=r"SGLang 0\.4\.9 is installed, but dustin-sglang supports sglang==0\.5\.17"):
        SpeculativeAlgorithm.from_string("dustin").handle_server_args(None)


@pytest.mark.usefixtures("clean_registry")
def test_any_failure_is_kept_and_raised_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no such kernel")

    monkeypatch.setattr(plugin, "_register", fail)
    plugin.register()
    plugin.register()  # still idempotent
    algorithm: Any = SpeculativeAlgorithm.from_string("dustin")
    with pytest.raises(RuntimeError, match="could not be set up: no such kernel"):
        algorithm.handle_server_args(None)


@pytest.mark.parametrize(
    "kind, eagle, eagle3, standalone",
    [("standalone", False, False, True), ("eagle", True, False, False), ("eagle3", True, True, False)],
)
def test_the_kind_of_draft_decides_what_the_algorithm_is(
    monkeypatch: pytest.MonkeyPatch, kind: str, eagle: bool, eagle3: bool, standalone: bool
) -> None:
    plugin.register()
    monkeypatch.setenv("DUSTIN_DRAFT_KIND", kind)
    algorithm = SpeculativeAlgorithm.from_string("dustin")
    assert (algorithm.is_eagle(), algorithm.is_eagle3(), algorithm.is_standalone()) == (eagle, eagle3, standalone)
    assert algorithm.carries_draft_hidden_states() is eagle and algorithm.need_topk()


@pytest.mark.usefixtures("clean_registry")
def test_a_failure_is_not_hidden_behind_unknown_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a --dustin-* flag on the command line, argparse must not end the program before the reason is raised."""
    order: list[str] = []
    monkeypatch.setattr(plugin, "_register_flags", lambda: order.append("flags"))
    monkeypatch.setattr(
        compat, "check_version", lambda: order.append("version") or (_ for _ in ()).throw(RuntimeError())
    )
    plugin.register()
    assert order == ["flags", "version"]
