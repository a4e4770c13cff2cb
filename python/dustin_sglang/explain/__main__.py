"""``python -m dustin_sglang.explain``: draw which positions each signal chose for one request.

::

    python -m dustin_sglang.explain --prompt FILE --question TEXT --out page.html

decodes the answer with both models in transformers and writes one HTML page. Without ``--prompt`` the request is the
demo's, whose models are also the default ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from dustin_sglang.calibrate.checks import check_vocabulary, require
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.config import DustinConfig
from dustin_sglang.profile import Profile, ProfileError, check_fingerprints, find_profile, load_profile
from dustin_sglang.selection.policies import POLICIES

_DTYPES = ("float32", "bfloat16", "float16")
_CHOOSING = sorted(name for name, policy in POLICIES.items() if not policy.dense)
_MODEL, _DRAFT = Path(".models/smollm2"), Path(".models/smollm2-draft26")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        _run(args)
    except (CalibrationError, ProfileError, OSError, UnicodeDecodeError) as error:
        print(f"explain: {str(error).replace('--dustin-profile', '--profile')}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    default = DustinConfig()
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m dustin_sglang.explain", description=description)
    add = parser.add_argument
    add("--prompt", metavar="FILE", help="text of the request, UTF-8; - reads standard input (default: the demo's)")
    add("--question", metavar="TEXT", help="asked after it (default: nothing more; the demo's for the demo's text)")
    add("--target", type=Path, default=_MODEL, metavar="MODEL", help="folder of the target (default: %(default)s)")
    add("--draft", type=Path, metavar="MODEL", help=f"folder of its draft, a whole model (default, for the default "
        f"target: {_DRAFT})")  # fmt: skip
    add("--out", type=Path, required=True, metavar="PAGE", help="HTML file to write")
    add("--budget", type=int, default=default.budget, metavar="K", help="positions of a list (default: %(default)s)")
    add("--sinks", type=int, default=default.sinks, metavar="N", help="first positions (default: %(default)s)")
    add("--window", type=int, default=default.window, metavar="N", help="last positions (default: %(default)s)")
    add("--policy", default=default.policy, help=f"one of {', '.join(_CHOOSING)} (default: %(default)s)")
    add("--profile", default=default.profile, metavar="FILE", help="JSON file of the scoring heads, or auto (default)")
    add("--new-tokens", type=int, default=32, metavar="N", help="tokens of the answer, to be reached (default: "
        "%(default)s)")  # fmt: skip
    add("--rows", type=int, default=4, metavar="N", help="rows of a verification (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--dtype", choices=_DTYPES, default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before a model is loaded."""
    if args.draft is None:
        if args.target != _MODEL:
            raise CalibrationError(
                "--target needs a --draft; python -m dustin_sglang.make_draft makes one of any model"
            )
        args.draft = _DRAFT
    require("--policy", args.policy, args.policy in _CHOOSING, "one of " + ", ".join(_CHOOSING))
    require("--sinks", args.sinks, args.sinks >= 0, "at least 0")
    require("--window", args.window, args.window >= 0, "at least 0")
    protected = args.sinks + args.window
    require("--budget", args.budget, args.budget > protected, f"above --sinks plus --window, {protected}")
    require("--new-tokens", args.new_tokens, args.new_tokens >= 2, "at least 2: the prefill gives the first one")
    require("--rows", args.rows, args.rows >= 3, "at least 3: a draft takes two steps or more")
    if args.prompt not in (None, "-") and not Path(args.prompt).is_file():
        raise CalibrationError(
            f"--prompt {args.prompt}: there is no such file; give a text file, or - for standard input"
        )
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise CalibrationError(f"--out {args.out}: give the name of a file in a folder that exists")


def _run(args: argparse.Namespace) -> None:
    from tqdm import tqdm
    from transformers import AutoTokenizer
    from transformers import logging as transformers_logging

    from dustin_sglang.explain.page import Subject, render
    from dustin_sglang.explain.prompt import encode, pieces, pieces_behind
    from dustin_sglang.explain.rounds import Request

    text = _read(args)
    transformers_logging.disable_progress_bar()
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    target, draft = (TracedModel(path, args.device, getattr(torch, dtype)) for path in (args.target, args.draft))
    check_vocabulary(target, draft)
    profile = _profile(args, target, draft)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompt = encode(tokenizer, text)
    capacity = len(prompt) + args.new_tokens + 2 * args.rows
    _check_length(args, len(prompt), min(target.max_tokens, draft.max_tokens))

    size = ListSize(args.budget, args.sinks, args.window)
    request = Request(target, draft, profile, args.policy, size, args.rows, capacity)
    print(f"reading {len(prompt)} tokens", flush=True)
    with tqdm(total=args.new_tokens, desc="new tokens") as bar:
        decoded = request.decode(prompt, args.new_tokens, tokenizer.eos_token_id, lambda done: bar.update(done - bar.n))
    facts = {
        "target": args.target.name, "draft": args.draft.name, "policy": args.policy, "profile": profile.name,
        "budget": f"{args.budget} positions", "prompt": f"{len(prompt)} tokens",
    }  # fmt: skip
    verified = [pieces_behind(tokenizer, decoded.ids[: one.length], one.tokens) for one in decoded.rounds]
    subject = Subject(decoded, pieces(tokenizer, decoded.ids), verified, request.budget, facts)
    args.out.write_text(render(subject), encoding="utf-8")
    print(f"written: {args.out}, {len(decoded.rounds)} rounds; open it in a browser")


def _read(args: argparse.Namespace) -> str:
    """The user's message."""
    from dustin_sglang.demo.case import load_case

    if args.prompt is None:
        return load_case(question=args.question).prompt
    text = sys.stdin.read() if args.prompt == "-" else Path(args.prompt).read_text(encoding="utf-8")
    return text if args.question is None else f"{text}\n\n{args.question}"


def _profile(args: argparse.Namespace, target: TracedModel, draft: TracedModel) -> Profile:
    paths = {"draft": str(args.draft), "target": str(args.target)}
    if args.profile == "auto":
        return find_profile(draft.shape, target.shape, paths)
    profile = load_profile(args.profile, draft.shape, target.shape)
    check_fingerprints(profile, paths)
    return profile


def _check_length(args: argparse.Namespace, prompt: int, most: int) -> None:
    """Refuse a prompt that is read whole, and one that the models have no room for."""
    allowed = f"below the prompt's {prompt} tokens: a context within the budget is read whole, and nothing is chosen"
    require("--budget", args.budget, args.budget < prompt, allowed)
    room = most - prompt - 2 * args.rows
    if room < 2:
        raise CalibrationError(f"--prompt has {prompt} tokens; these models take {most - 2 * args.rows - 2} at most")
    require("--new-tokens", args.new_tokens, args.new_tokens <= room, f"at most {room} behind the prompt")


if __name__ == "__main__":
    sys.exit(main())
