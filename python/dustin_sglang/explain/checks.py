"""Refuses what cannot be explained, before a model reads anything; each message names flag, value and range."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dustin_sglang.calibrate.checks import require
from dustin_sglang.calibrate.trace import CalibrationError
from dustin_sglang.grouping import Grouping
from dustin_sglang.profile import Profile
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.policies import POLICIES

MODEL, DRAFT = Path(".models/smollm2"), Path(".models/smollm2-draft26")  # the demo's
# What makes one list: hybrid-depth's are those of lookahead and of history.
CHOOSING = sorted(name for name, policy in POLICIES.items() if not policy.dense and policy.why_not_groups(1) is None)


def check_arguments(args: argparse.Namespace) -> None:
    """Check the command line, and fill in the default target's draft.

    Raises
    ------
    CalibrationError
        An argument is out of its range, or a file has nowhere to come from or go to.
    """
    if args.draft is None:
        if args.target != MODEL:
            raise CalibrationError(
                f"--target {args.target} needs a --draft; python -m dustin_sglang.make_draft makes one of any model"
            )
        args.draft = DRAFT
    require("--policy", args.policy, args.policy in CHOOSING, "one of " + ", ".join(CHOOSING))
    require("--sinks", args.sinks, args.sinks >= 0, "at least 0")
    require("--window", args.window, args.window >= 0, "at least 0")
    protected = args.sinks + args.window
    require("--budget", args.budget, args.budget > protected, f"above --sinks plus --window, {protected}")
    require("--new-tokens", args.new_tokens, args.new_tokens >= 2, "at least 2: the prefill gives the first one")
    require("--rows", args.rows, args.rows >= 3, "at least 3: a draft takes two steps or more")
    require("--device", args.device, args.device == "cpu" or _is_gpu(args.device), "cpu, or a GPU that torch finds")
    if args.prompt not in (None, "-") and not Path(args.prompt).is_file():
        raise CalibrationError(f"--prompt {args.prompt} is not a file; give a text file, or - for standard input")
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise CalibrationError(f"--out {args.out}: give the name of a file in a folder that exists")


def check_groups(args: argparse.Namespace, profile: Profile) -> Grouping:
    """Check the groups of the target's layers and return what they score.

    Raises
    ------
    CalibrationError
        There are too many, the policy cannot have them, or the one to draw is not among them.
    """
    policy, layers, count = POLICIES[args.policy](), profile.target.layers, args.layer_groups
    if count is None:
        count = profile.layer_groups if policy.mixes else 1
    require("--layer-groups", count, 1 <= count <= layers, f"from 1 to {layers}, the target's layers")
    grouping = Grouping(profile, policy, LayerGroups(layers, count))
    if obstacle := policy.why_not_groups(count, mixed=grouping.weights is not None):
        raise CalibrationError(f"--layer-groups is {count} with --policy {args.policy}: {obstacle}")
    require("--group", args.group, 1 <= args.group <= count, f"from 1 to --layer-groups, {count}")
    return grouping


def check_length(args: argparse.Namespace, prompt: int, most: int) -> None:
    """Check that a prompt of that many tokens is read in part, by models that take `most` tokens.

    Raises
    ------
    CalibrationError
        It is within the budget, or too long.
    """
    allowed = f"below the prompt's {prompt} tokens: a context within the budget is read whole, and nothing is chosen"
    require("--budget", args.budget, args.budget < prompt, allowed)
    room = most - prompt - 2 * args.rows
    if room < 2:
        raise CalibrationError(f"--prompt has {prompt} tokens; these models take {most - 2 * args.rows - 2} at most")
    require("--new-tokens", args.new_tokens, args.new_tokens <= room, f"at most {room} behind the prompt")


def _is_gpu(device: str) -> bool:
    kind, _, number = device.partition(":")
    return kind == "cuda" and (not number or number.isdecimal()) and int(number or 0) < torch.cuda.device_count()
