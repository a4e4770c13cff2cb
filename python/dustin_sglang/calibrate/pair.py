"""Target and draft of a command line: where they run, in what type, and that they belong together."""

from __future__ import annotations

import argparse

import torch

from dustin_sglang.calibrate.checks import check_vocabulary
from dustin_sglang.calibrate.trace import TracedModel

_DTYPES = ("float32", "bfloat16", "float16")


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--dtype", choices=_DTYPES, default=None, help="default: bfloat16 on a GPU, float32 on a CPU")


def load_pair(args: argparse.Namespace) -> tuple[TracedModel, TracedModel]:
    """Load ``args.target`` and ``args.draft``; ``args.dtype`` then names the type that they run in.

    Raises
    ------
    CalibrationError
        A folder without a model that can be traced, or a draft of another vocabulary.
    """
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    target, draft = (TracedModel(path, args.device, getattr(torch, args.dtype)) for path in (args.target, args.draft))
    check_vocabulary(target, draft)
    return target, draft
