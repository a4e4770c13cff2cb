"""The command line of the demo: two servers, one question, one comparison."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import openai

from dustin_sglang.config import DustinConfig
from dustin_sglang.demo.case import Case, load_case
from dustin_sglang.demo.client import MAX_TOKENS, Answer, ask, curl_line
from dustin_sglang.demo.counters import Counts, parse_counters
from dustin_sglang.demo.report import Report, first_divergence, render
from dustin_sglang.demo.server import Server, ServerError, launch_command

MODEL, DRAFT = Path(".models/smollm2"), Path(".models/smollm2-draft26")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; end the program with a message where it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="./run demo",
        description="Ask a real SGLang server about a long document, with sparse and with dense verification.",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the target model (default: %(default)s)")
    parser.add_argument("--draft", type=Path, help=f"folder of its draft (default, for the default model: {DRAFT})")
    parser.add_argument("--document", type=Path, help="text file to ask about (default: a chapter of a novel)")
    parser.add_argument("--question", help="what to ask about it")
    parser.add_argument("--expected", help="phrase that a right answer contains")
    parser.add_argument("--budget", type=int, default=512, help="positions a verification reads (default: %(default)s)")
    parser.add_argument(
        "--policy", default=DustinConfig().policy, help="value of --dustin-policy (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the server (default: a free one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--serve", action="store_true", help="leave the server up; nothing is asked of a dense one")
    args = parser.parse_args(argv)
    if args.serve and args.json:
        parser.error("--json compares with a dense server, which --serve does not start: leave one of them out")
    if args.draft is None:
        if args.model != MODEL:
            parser.error("--model needs a --draft; `python -m dustin_sglang.make_draft` makes one of any model")
        args.draft = DRAFT
    for name in ("model", "draft"):
        folder: Path = getattr(args, name)
        if not (folder / "config.json").is_file():
            parser.error(f"--{name}: {folder} is no model folder (./run demo makes the default ones)")
    if args.document is not None and not args.document.is_file():
        parser.error(f"--document: there is no file {args.document}")
    if args.document is not None and args.question is None:
        parser.error("--document needs a --question of its own")
    return args


def find_device() -> str:
    """Return the name of the GPU where SGLang can use one, otherwise "cpu"."""
    import torch

    usable = all(importlib.util.find_spec(name) is not None for name in ("flashinfer", "sgl_kernel"))
    return torch.cuda.get_device_name() if torch.cuda.is_available() and usable else "cpu"


def draft_kind(draft: Path) -> str:
    """Return the kind of a draft, named as SGLang's algorithms are, from its config."""
    (architecture, *_) = json.loads((draft / "config.json").read_text()).get("architectures") or [""]
    if "Eagle3" in architecture:
        return "eagle3"
    return "eagle" if "Eagle" in architecture else "standalone"


def ask_server(server: Server, case: Case, tokens: int, label: str) -> tuple[Answer, Counts]:
    """Ask a server the question; return the answer and what the server counted meanwhile."""
    print(f"{label}:", flush=True)
    before = parse_counters(server.get("/metrics").text)
    answer = ask(server.url, case.prompt, f"  reading {tokens} tokens")
    return answer, Counts(before, parse_counters(server.get("/metrics").text))


def run(args: argparse.Namespace) -> None:
    """Run the demo."""
    start = time.monotonic()
    case = load_case(args.document, args.question, args.expected)
    tokenizer = load_tokenizer(args.model)
    tokens = len(tokenizer.encode(case.prompt))
    device = find_device()
    print(f"device    {device}\nmodel     {args.model}, draft {args.draft}\ndocument  {tokens} tokens", end="")
    print(f", '{case.expected}' at {case.depth:.0%} of it" if case.depth is not None else "")
    print(f"question  {case.question}", flush=True)

    def server(policy: str) -> Server:
        context = tokens + MAX_TOKENS + 256  # the chat template and the drafts
        command = launch_command(device, str(args.model), str(args.draft), args.budget, policy, context)
        return Server(command, f"starting a server, policy {policy}", args.port)

    with server(args.policy) as up:
        sparse, counts = ask_server(up, case, tokens, f"{args.policy}, {args.budget} positions")
        if args.serve:
            print(f"the server stays up until Ctrl-C; its log is {up.log}\n  {curl_line(up.url)}", flush=True)
            up.wait()
            raise ServerError(f"the server ended by itself; its log is {up.log}")
    with server("dense") as up:
        dense, dense_counts = ask_server(up, case, tokens, "dense")

    ids = [tokenizer.encode(answer.text, add_special_tokens=False) for answer in (sparse, dense)]
    report = Report(
        device=device,
        model=args.model.name,
        context_tokens=sparse.prompt_tokens,
        budget=args.budget,
        sparse_verify_steps=counts.sparse_steps,
        mean_selected=counts.mean_selected,
        accept_length=counts.accept_length,
        policy=args.policy,
        draft_kind=draft_kind(args.draft),
        **{f"selected_share_{source}": counts.share(source) for source in ("lookahead", "history", "protected")},
        answer=sparse.text,
        dense_answer=dense.text,
        expected=case.expected,
        found=None if case.expected is None else all(case.expected in answer.text for answer in (sparse, dense)),
        first_divergence=first_divergence(*ids),
        seconds=round(time.monotonic() - start, 1),
    )
    print(f"\n{render(report, sparse, dense, counts, dense_counts.accept_length, case)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is taken down
    try:
        run(args)
    except (ServerError, openai.OpenAIError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
