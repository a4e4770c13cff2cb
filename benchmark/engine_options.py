"""The engines that are compared, as options of SGLang, and the models that they run."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_shape

from dustin_sglang.profile import GroupWeights, ModelShape, auto_profile, save_profile

NO_SPECULATION, STANDALONE, DUSTIN, SPARSE_DRAFT = ENGINES = ("none", "STANDALONE", "dustin", "dustin+sparse-draft")


@dataclass(frozen=True)
class Models:
    """Target and draft.

    Attributes
    ----------
    target, draft
        Folders.
    dummy
        Whether they hold a config alone: weights are then random and acceptance is forced.
    """

    target: Path
    draft: Path
    dummy: bool


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what runs."""
    parser.add_argument("--target", default="llama-3.1-8b", help=f"folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--draft", default="draft-0.5b", help="the same")
    parser.add_argument("--methods", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--budget", type=int, default=512, help="k, positions a verification reads")
    parser.add_argument("--steps", type=int, default=4, help="draft steps; one more token is verified")
    parser.add_argument("--accept-length", type=float, default=3.0, help="forced, with shapes")
    parser.add_argument(
        "--layer-groups", type=int, default=1, help="DUSTIN_LAYER_GROUPS; groups of shapes have made-up weights"
    )
    parser.add_argument("--mass", type=float, default=1.0, help="DUSTIN_MASS")
    parser.add_argument("--extra-step", default="auto", choices=["auto", "off"], help="DUSTIN_EXTRA_STEP")
    parser.add_argument("--rectify-interval", type=int, default=0, help="DUSTIN_RECTIFY_INTERVAL")
    parser.add_argument(
        "--prefill-graphs",
        action="store_true",
        help="capture small ones of SGLang's prefill graphs, for passes that rectify",
    )
    parser.add_argument("--sparse-draft", default="all", choices=["all", "unscored"], help="DUSTIN_SPARSE_DRAFT")
    parser.add_argument("--memory", type=float, default=0.85, help="SGLang's mem_fraction_static")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--gate", type=Path, help="lock file: measure while no other command does that names it")


@contextlib.contextmanager
def alone(gate: Path | None) -> Iterator[None]:
    """Keep other commands with the same gate from measuring; None keeps nobody."""
    if gate is None:
        yield
        return
    with gate.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_models(args: argparse.Namespace, root: Path) -> Models:
    """Return the models of the command line; shapes are written under `root`."""
    names = (args.target, args.draft)
    if all(name in SHAPES for name in names):
        vocabulary = SHAPES[args.target]["vocab_size"]
        models = Models(write_shape(args.target, root), write_shape(args.draft, root, vocabulary), dummy=True)
        if args.layer_groups > 1:
            os.environ["DUSTIN_PROFILE"] = write_profile(args, root / "groups.json")
        return models
    for name in names:
        if not Path(name).is_dir():
            raise SystemExit(f"{name} is neither a folder nor, with the other model, one of {', '.join(SHAPES)}")
    return Models(Path(args.target), Path(args.draft), dummy=False)


def write_profile(args: argparse.Namespace, file: Path) -> str:
    """Write the automatic profile of two shapes with weights for groups of layers, drawn at random; return its path."""
    draft, target = (
        ModelShape(
            layers=SHAPES[name]["num_hidden_layers"],
            heads=SHAPES[name]["num_attention_heads"],
            kv_heads=SHAPES[name]["num_key_value_heads"],
            head_dim=SHAPES[name]["head_dim"],
        )
        for name in (args.draft, args.target)
    )
    profile, draws = auto_profile(draft, target), random.Random(0)
    groups = []
    for _ in range(args.layer_groups):
        weights = [draws.random() for _ in profile.lookahead.layers]
        groups.append(tuple(weight / sum(weights) for weight in weights))
    mixed = {args.layer_groups: GroupWeights(tuple(groups), (0.75,) * args.layer_groups)}
    save_profile(replace(profile, grouped_lookahead=mixed, layer_groups=args.layer_groups), str(file))
    return str(file)


def options(method: str, models: Models, args: argparse.Namespace, batch: int, context: int) -> dict[str, Any]:
    """Return the engine's arguments for up to `batch` requests of `context` tokens with their answers."""
    common: dict[str, Any] = dict(
        model_path=str(models.target),
        load_format="dummy" if models.dummy else "auto",
        attention_backend="flashinfer",
        cuda_graph_max_bs_decode=batch,
        max_running_requests=batch,
        context_length=context,
        mem_fraction_static=args.memory,
        chunked_prefill_size=16384,
        tp_size=args.tp,
        log_level="warning",
    )
    common |= prefill_graphs(args)
    if method == NO_SPECULATION:
        return common
    return common | dict(
        speculative_algorithm=method.split("+")[0],
        speculative_draft_model_path=str(models.draft),
        speculative_num_steps=args.steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=args.steps + 1,
    )


def prefill_graphs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments for graphs of prefills: of rectifying passes, or none, to start sooner."""
    return dict(cuda_graph_max_bs_prefill=256) if args.prefill_graphs else dict(disable_prefill_cuda_graph=True)


def set_environment(method: str, models: Models, args: argparse.Namespace) -> None:
    """Set the variables that an engine's processes inherit, and unset those of another one."""
    wanted = {
        "DUSTIN_BUDGET": str(args.budget),
        "DUSTIN_LAYER_GROUPS": str(args.layer_groups),
        "DUSTIN_MASS": str(args.mass),
        "DUSTIN_EXTRA_STEP": args.extra_step,
        "DUSTIN_RECTIFY_INTERVAL": str(args.rectify_interval),
        "DUSTIN_SPARSE_DRAFT": args.sparse_draft if method == SPARSE_DRAFT else None,
        "SGLANG_SIMULATE_ACC_LEN": str(args.accept_length) if models.dummy else None,
        "SGLANG_PROFILE_WITH_STACK": "false",
        "SGLANG_PROFILE_RECORD_SHAPES": "false",
    }
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return engine arguments as flags of `sglang.launch_server`."""
    result = []
    for name, value in arguments.items():
        result += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    return result


def row_key(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the part of a row's key that names engine and models; None for what an option leaves as it is.

    So rows from before an option have the key of rows without it.
    """
    speculates, ours = method != NO_SPECULATION, method in (DUSTIN, SPARSE_DRAFT)
    return dict(
        shape=Path(args.target).name,
        draft=Path(args.draft).name if speculates else None,
        method=method,
        k=args.budget if ours else None,
        layer_groups=args.layer_groups if ours and args.layer_groups > 1 else None,
        mass=args.mass if ours and args.mass < 1 else None,
        extra_step=args.extra_step if ours and args.extra_step != "auto" else None,
        rectify_interval=args.rectify_interval if ours and args.rectify_interval else None,
        g=args.steps + 1 if speculates else 1,
        sparse_draft=args.sparse_draft if method == SPARSE_DRAFT else None,
        tp=args.tp,
    )


VARIANTS = ("mass", "extra_step", "rectify_interval")  # of dustin, None as it starts by itself
ENGINE_KEY = ("shape", "draft", "method", "k", "layer_groups", *VARIANTS, "g", "sparse_draft", "tp")
