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

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.pair import add_device_options, load_pair
from dustin_sglang.calibrate.trace import CalibrationError
from dustin_sglang.config import DustinConfig
from dustin_sglang.explain.checks import CHOOSING, DRAFT, MODEL, check_arguments, check_groups, check_length
from dustin_sglang.profile import choose_profile
from dustin_sglang.profile_file import ProfileError


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        check_arguments(args)
        _run(args)
    except (CalibrationError, ProfileError, OSError) as error:
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
    add("--target", type=Path, default=MODEL, metavar="MODEL", help="folder of the target (default: %(default)s)")
    add("--draft", type=Path, metavar="MODEL", help=f"folder of its draft, a whole model (default, for the default "
        f"target: {DRAFT})")  # fmt: skip
    add("--out", type=Path, required=True, metavar="PAGE", help="HTML file to write")
    add("--budget", type=int, default=default.budget, metavar="K", help="positions of a list (default: %(default)s)")
    add("--sinks", type=int, default=default.sinks, metavar="N", help="first positions (default: %(default)s)")
    add("--window", type=int, default=default.window, metavar="N", help="last positions (default: %(default)s)")
    add("--policy", default=default.policy, help=f"one of {', '.join(CHOOSING)} (default: %(default)s)")
    add("--profile", default=default.profile, metavar="FILE", help="JSON file of the scoring heads, or auto (default)")
    add("--layer-groups", type=int, metavar="G", help="groups of target layers with a list each (default: the "
        "profile's)")  # fmt: skip
    add("--group", type=int, default=1, metavar="N", help="the group whose list is drawn, 1 for the shallowest "
        "(default: %(default)s)")  # fmt: skip
    add("--new-tokens", type=int, default=32, metavar="N", help="tokens of the answer, to be reached (default: "
        "%(default)s)")  # fmt: skip
    add("--rows", type=int, default=4, metavar="N", help="rows of a verification (default: %(default)s)")
    add_device_options(parser)
    return parser


def _run(args: argparse.Namespace) -> None:
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from dustin_sglang.explain.page import Subject, render
    from dustin_sglang.explain.prompt import encode, pieces, pieces_behind
    from dustin_sglang.explain.rounds import Request

    text = _read(args)
    target, draft = load_pair(args)
    paths = {"draft": str(args.draft), "target": str(args.target)}
    profile = choose_profile(args.profile, draft.shape, target.shape, paths)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompt = encode(tokenizer, text)
    capacity = len(prompt) + args.new_tokens + 2 * args.rows
    grouping = check_groups(args, profile)
    check_length(args, len(prompt), min(target.max_tokens, draft.max_tokens))

    size = ListSize(args.budget, args.sinks, args.window)
    groups = grouping.groups
    layers = groups.ranges[args.group - 1]
    profile = grouping.of_one(args.group - 1)
    request = Request(target, draft, profile, args.policy, size, args.rows, capacity, layers)
    print(f"reading {len(prompt)} tokens", flush=True)
    with tqdm(total=args.new_tokens, desc="new tokens") as bar:
        decoded = request.decode(prompt, args.new_tokens, tokenizer.eos_token_id, lambda done: bar.update(done - bar.n))
    facts = {
        "target": args.target.name, "draft": args.draft.name, "policy": args.policy, "profile": profile.name,
        "budget": f"{args.budget} positions", "prompt": f"{len(prompt)} tokens",
    }  # fmt: skip
    if groups.count > 1:
        facts["layers"] = f"{layers.start} to {layers.stop - 1}, group {args.group} of {groups.count}"
    verified = [pieces_behind(tokenizer, decoded.ids[: one.length], one.tokens) for one in decoded.rounds]
    subject = Subject(decoded, pieces(tokenizer, decoded.ids), verified, request.budget, facts)
    args.out.write_text(render(subject), encoding="utf-8")
    print(f"written: {args.out}, {len(decoded.rounds)} rounds; open it in a browser")


def _read(args: argparse.Namespace) -> str:
    """Return the user's message.

    Raises
    ------
    CalibrationError
        It is not UTF-8.
    """
    from dustin_sglang.demo.case import load_case

    if args.prompt is None:
        return load_case(question=args.question).prompt
    try:
        text = sys.stdin.read() if args.prompt == "-" else Path(args.prompt).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"--prompt {args.prompt}: {error}") from error
    return text if args.question is None else f"{text}\n\n{args.question}"


if __name__ == "__main__":
    sys.exit(main())
