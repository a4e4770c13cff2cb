"""Settings: defaults, variables, flags, and what a bad value says."""

import argparse

import pytest

from dustin_sglang.config import ConfigError, DustinConfig, add_flags, flags_to_env


def test_defaults_are_the_documented_ones() -> None:
    assert DustinConfig.from_env({}) == DustinConfig(
        512, 4, 64, None, "auto", "hybrid-sum", 1.0, None, "exact", "off", "auto", "auto", 0, 0, 0.0
    )


def test_variables_set_every_field() -> None:
    env = {
        "DUSTIN_BUDGET": "256",
        "DUSTIN_SINKS": "2",
        "DUSTIN_WINDOW": "16",
        "DUSTIN_LOOKAHEAD_SHARE": "0.75",
        "DUSTIN_PROFILE": "pair.json",
        "DUSTIN_POLICY": "history",
        "DUSTIN_MASS": "0.9",
        "DUSTIN_LAYER_GROUPS": "4",
        "DUSTIN_RADIX": "shared",
        "DUSTIN_SPARSE_DRAFT": "unscored",
        "DUSTIN_EXTRA_STEP": "off",
        "DUSTIN_ATTENTION": "flashinfer",
        "DUSTIN_RECTIFY_INTERVAL": "64",
        "DUSTIN_MONITOR_INTERVAL": "16",
        "DUSTIN_DENSE_FALLBACK": "0.5",
    }
    want = DustinConfig(
        256, 2, 16, 0.75, "pair.json", "history", 0.9, 4, "shared", "unscored", "off", "flashinfer", 64, 16, 0.5
    )
    assert DustinConfig.from_env(env) == want


@pytest.mark.parametrize(
    "name, value, flag, allowed",
    [
        ("BUDGET", "0", "--dustin-budget", "at least 1"),
        ("BUDGET", "many", "--dustin-budget", "an integer of at least 1"),
        ("SINKS", "-1", "--dustin-sinks", "at least 0"),
        ("WINDOW", "-5", "--dustin-window", "at least 0"),
        ("LOOKAHEAD_SHARE", "1.5", "--dustin-lookahead-share", "from 0 to 1"),
        ("LOOKAHEAD_SHARE", "nan", "--dustin-lookahead-share", "from 0 to 1"),
        ("POLICY", "best", "--dustin-policy", "hybrid"),
        ("MASS", "0", "--dustin-mass", "above 0 and at most 1"),
        ("MASS", "1.5", "--dustin-mass", "above 0 and at most 1"),
        ("MASS", "nan", "--dustin-mass", "above 0 and at most 1"),
        ("LAYER_GROUPS", "0", "--dustin-layer-groups", "from 1"),
        ("LAYER_GROUPS", "two", "--dustin-layer-groups", "an integer from 1"),
        ("RADIX", "yes", "--dustin-radix", "exact, shared"),
        ("SPARSE_DRAFT", "on", "--dustin-sparse-draft", "off, all, unscored"),
        ("EXTRA_STEP", "on", "--dustin-extra-step", "auto, off"),
        ("ATTENTION", "fa3", "--dustin-attention", "auto, dustin, flashinfer"),
        ("RECTIFY_INTERVAL", "-1", "--dustin-rectify-interval", "an integer from 0 (off) to 512"),
        ("RECTIFY_INTERVAL", "513", "--dustin-rectify-interval", "an integer from 0 (off) to 512"),
    ],
)
def test_a_bad_value_names_flag_value_and_range(name: str, value: str, flag: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        DustinConfig.from_env({f"DUSTIN_{name}": value})
    message = str(error.value)
    assert flag in message and value in message and allowed in message


@pytest.mark.parametrize("policy", ["streaming", "random", "dense"])
def test_a_policy_without_scores_cannot_end_lists_by_mass(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"--dustin-mass .* is 0.9 with --dustin-policy {policy}.*use 1"):
        DustinConfig.from_env({"DUSTIN_MASS": "0.9", "DUSTIN_POLICY": policy})


def test_protected_positions_must_fit_in_the_budget() -> None:
    with pytest.raises(ConfigError, match="--dustin-window 64 do not fit in --dustin-budget 60"):
        DustinConfig.from_env({"DUSTIN_BUDGET": "60"})


def test_flags_go_to_the_variables_and_absent_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUSTIN_WINDOW", "32")
    monkeypatch.setenv("DUSTIN_BUDGET", "99")
    monkeypatch.setenv("DUSTIN_POLICY", "hybrid")  # set here, so that what the flags write is undone after the test
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags_to_env(parser.parse_args(["--dustin-budget", "128", "--dustin-policy", "lookahead"]))
    assert DustinConfig.from_env() == DustinConfig(budget=128, window=32, policy="lookahead")
