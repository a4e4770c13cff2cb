"""The settings of the algorithm: `DustinConfig`, its ``DUSTIN_*`` variables and its ``--dustin-*`` flags.

SGLang has no field for a plugin's own settings, so they travel in environment variables, which every spawned rank
inherits. A flag is written to its variable when the command line is parsed; ``sgl.Engine`` users set the variables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dustin_sglang.selection.policies import POLICIES

RADIX_MODES = ("exact", "shared")
ATTENTIONS = ("auto", "dustin", "flashinfer")
SPARSE_DRAFT_MODES = ("off", "all", "unscored")
EXTRA_STEP_MODES = ("auto", "off")
# Beyond it, most answers would end before their first rectifying pass.
MAX_RECTIFY_INTERVAL = 512
_GROUPS_RANGE = "an integer from 1 (one list for all layers) to the target's layers"
_MASS_RANGE = "a number above 0 and at most 1 (lists of the whole budget)"
_RECTIFY_RANGE = f"an integer from 0 (off) to {MAX_RECTIFY_INTERVAL}"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the flag, the value and the range."""


@dataclass(frozen=True)
class DustinConfig:
    """Settings of one launch; the defaults are those of docs/architecture.md.

    Attributes
    ----------
    budget
        k, the positions of the committed context that verification may read, a request.
    sinks, window
        First and last positions that every list holds; part of the budget.
    lookahead_share
        Share of the unprotected budget that lookahead fills, or its weight in a sum of both signals; ``None`` takes
        the profile's.
    profile
        ``"auto"`` or the path of a JSON profile.
    policy
        Name of a policy of `dustin_sglang.selection.policies`.
    mass
        P: a list ends where it holds this share of the estimated attention to unprotected positions; 1 never ends it
        before the budget.
    layer_groups
        G, contiguous groups of target layers, each of which reads a list of its own; ``None`` takes the profile's.
    radix
        ``"exact"``: KV computed under sparse attention never enters the radix tree. ``"shared"``: it does, tagged.
    sparse_draft
        Draft layers that read the last list and the tokens since instead of everything: none (``"off"``), ``"all"``,
        or all that do not score (``"unscored"``).
    extra_step
        Whether the draft takes one step more, whose query looks ahead for the last verified token: ``"auto"`` where
        it can (a whole-model draft that drafts chains), or ``"off"``.
    attention
        What verifies on a GPU: this project's kernel (``"dustin"``), ``"flashinfer"``, or ``"auto"``: the kernel where
        it can.
    rectify_interval
        N: every N committed tokens a dense pass rewrites their approximate KV; 0 never does.
    monitor_interval
        N: every N sparse verifications one is also run densely and the two compared; 0 never does.
    dense_fallback
        A request whose recent agreement falls below this is verified densely from then on; 0 never is.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    budget: int = 512
    sinks: int = 4
    window: int = 64
    lookahead_share: float | None = None
    profile: str = "auto"
    policy: str = "hybrid-sum"
    mass: float = 1.0
    layer_groups: int | None = None
    radix: str = "exact"
    sparse_draft: str = "off"
    extra_step: str = "auto"
    attention: str = "auto"
    rectify_interval: int = 0
    monitor_interval: int = 0
    dense_fallback: float = 0.0

    def __post_init__(self) -> None:
        _check("budget", self.budget, self.budget >= 1, "an integer of at least 1")
        _check("sinks", self.sinks, self.sinks >= 0, "an integer of at least 0")
        _check("window", self.window, self.window >= 0, "an integer of at least 0")
        share = self.lookahead_share
        _check("lookahead_share", share, share is None or 0.0 <= share <= 1.0, "a number from 0 to 1")
        _check("policy", self.policy, self.policy in POLICIES, "one of " + ", ".join(sorted(POLICIES)))
        _check("mass", self.mass, 0.0 < self.mass <= 1.0, _MASS_RANGE)
        if self.mass < 1 and not (POLICIES[self.policy].uses_lookahead or POLICIES[self.policy].uses_history):
            raise ConfigError(
                f"--dustin-mass (or DUSTIN_MASS) is {self.mass:g} with --dustin-policy {self.policy}, which scores "
                "nothing to estimate mass by; use 1"
            )
        groups = self.layer_groups
        _check("layer_groups", groups, groups is None or groups >= 1, _GROUPS_RANGE)
        # Whether lookahead can differ between groups is the profile's to say, and `wiring` asks it.
        if obstacle := POLICIES[self.policy].why_not_groups(groups or 1, mixed=True):
            raise groups_refused(groups or 1, self.policy, obstacle)
        _check("radix", self.radix, self.radix in RADIX_MODES, "one of " + ", ".join(RADIX_MODES))
        modes = SPARSE_DRAFT_MODES
        _check("sparse_draft", self.sparse_draft, self.sparse_draft in modes, "one of " + ", ".join(modes))
        steps = EXTRA_STEP_MODES
        _check("extra_step", self.extra_step, self.extra_step in steps, "one of " + ", ".join(steps))
        _check("attention", self.attention, self.attention in ATTENTIONS, "one of " + ", ".join(ATTENTIONS))
        interval = self.rectify_interval
        _check("rectify_interval", interval, 0 <= interval <= MAX_RECTIFY_INTERVAL, _RECTIFY_RANGE)
        _check("monitor_interval", self.monitor_interval, self.monitor_interval >= 0, "an integer of at least 0 (off)")
        _check("dense_fallback", self.dense_fallback, 0.0 <= self.dense_fallback <= 1.0, "a number from 0 (off) to 1")
        if self.dense_fallback and not self.monitor_interval:
            raise ConfigError(
                f"--dustin-dense-fallback {self.dense_fallback} compares sparse with dense verifications, but "
                "--dustin-monitor-interval is 0, so that none runs densely; give an interval of at least 1"
            )
        if self.sinks + self.window > self.budget:
            raise ConfigError(
                f"--dustin-sinks {self.sinks} and --dustin-window {self.window} do not fit in --dustin-budget "
                f"{self.budget}: protected positions are part of the budget; sinks + window must be at most the budget"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> DustinConfig:
        """Read the ``DUSTIN_*`` variables of `env` (default: the process's own).

        Raises
        ------
        ConfigError
            A variable that does not parse or is out of range.
        """
        env = os.environ if env is None else env
        given: dict[str, Any] = {}
        for field in fields(cls):
            text = env.get(variable(field.name))
            if text is not None:
                given[field.name] = _parse(field.name, text)
        return cls(**given)


def groups_refused(count: int, policy: str, obstacle: str) -> ConfigError:
    """The error of a number of layer groups that a policy cannot have."""
    return ConfigError(
        f"--dustin-layer-groups (or DUSTIN_LAYER_GROUPS) is {count} with --dustin-policy {policy}: {obstacle}"
    )


def variable(name: str) -> str:
    """Environment variable of setting `name`."""
    return "DUSTIN_" + name.upper()


def flag(name: str) -> str:
    """Command-line flag of setting `name`."""
    return "--dustin-" + name.replace("_", "-")


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "budget": (int, "an integer of at least 1"),
    "sinks": (int, "an integer of at least 0"),
    "window": (int, "an integer of at least 0"),
    "lookahead_share": (float, "a number from 0 to 1"),
    "mass": (float, _MASS_RANGE),
    "layer_groups": (int, _GROUPS_RANGE),
    "rectify_interval": (int, _RECTIFY_RANGE),
    "monitor_interval": (int, "an integer of at least 0 (off)"),
    "dense_fallback": (float, "a number from 0 (off) to 1"),
}
_HELP = {
    "budget": "Positions of a request's context that verification may read (k).",
    "sinks": "First positions that are always read; part of the budget.",
    "window": "Last positions that are always read; part of the budget.",
    "lookahead_share": "Share of the unprotected budget filled by the draft's lookahead; for policy hybrid-sum its "
    "weight in the sum; default: the profile's.",
    "profile": "JSON file of the heads that choose, or 'auto'.",
    "policy": "How positions are chosen: " + ", ".join(sorted(POLICIES)) + ".",
    "mass": "Share of the estimated attention with which a list ends, before the budget if need be (P).",
    "layer_groups": "Contiguous groups of target layers, each of which reads a list of its own (G).",
    "radix": "'exact': approximate KV is never shared between requests; 'shared': it is, and the metrics show it.",
    "sparse_draft": "Draft layers that read the last list and the tokens since only: 'off', 'all', or 'unscored', all "
    "but the profile's.",
    "extra_step": "One draft step more, so that the last drafted token looks ahead too: 'auto', where the draft is a "
    "whole model and drafts chains, or 'off'.",
    "attention": "What verifies on a GPU: 'dustin' (this project's kernel), 'flashinfer', or 'auto': ours if it can.",
    "rectify_interval": "Committed tokens after which a dense pass rewrites their approximate KV; 0: never.",
    "monitor_interval": "Sparse verifications from one that is also run densely to the next; 0: none.",
    "dense_fallback": "Recent agreement below which a request is verified densely from then on; 0: never. Needs "
    "--dustin-monitor-interval.",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ``--dustin-*`` flags to SGLang's parser.

    Values stay strings: `DustinConfig` checks them when the algorithm is used, with a message that names the range.
    """
    group = parser.add_argument_group("dustin", "Sparse verification (--speculative-algorithm dustin).")
    for field in fields(DustinConfig):
        default = "the profile's" if field.default is None else field.default
        group.add_argument(
            flag(field.name),
            metavar=field.name.upper(),
            default=None,
            help=f"{_HELP[field.name]} Default: {default}. Also {variable(field.name)}.",
        )


def flags_to_env(args: argparse.Namespace) -> None:
    """Write the flags that were given to their variables, from where every rank reads them."""
    for field in fields(DustinConfig):
        value = getattr(args, f"dustin_{field.name}", None)
        if value is not None:
            os.environ[variable(field.name)] = str(value)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{flag(name)} (or {variable(name)}) is {value!r}; it must be {allowed}")


def _parse(name: str, text: str) -> Any:
    parser, allowed = _PARSERS.get(name, (str, ""))
    try:
        return parser(text)
    except ValueError:
        raise ConfigError(f"{flag(name)} (or {variable(name)}) is {text!r}; it must be {allowed}") from None
