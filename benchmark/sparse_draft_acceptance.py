"""Accept length with a dense and with a sparse draft, on real models over a real text.

    python3 benchmark/sparse_draft_acceptance.py --json benchmark/results/sparse_draft.json
    PYTHONPATH=benchmark python3 -m dustin_sglang.cpu sparse_draft_acceptance --json ...    # without a GPU

One engine for each mode of --dustin-sparse-draft answers the same questions about the demo's document, greedily. What a
draft reads changes its queries and with them the lists of verification, so answers may differ between modes; the rows
hold them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dustin_sglang.config import SPARSE_DRAFT_MODES
from dustin_sglang.demo.case import load_case

QUESTIONS = (
    load_case().question,
    "Who is Barrymore, and what does he look like?",
    "Describe the house as the travellers first see it.",
    "Why are there soldiers on the road?",
    "What sound does the narrator hear at night?",
    "Summarise this chapter in three sentences.",
)


def measure(mode: str, prompts: list[list[int]], tokenizer: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer every prompt with one engine; a row a prompt."""
    import sglang as sgl

    os.environ |= {"DUSTIN_SPARSE_DRAFT": mode, "DUSTIN_BUDGET": str(args.budget)}
    on_gpu = torch.cuda.is_available()
    device: dict[str, Any] = (
        dict(dtype="bfloat16", mem_fraction_static=0.5, disable_prefill_cuda_graph=True)
        if on_gpu
        else dict(dtype="float32", device="cpu", max_total_tokens=2 * max(map(len, prompts)) + 1024)
    )
    engine = sgl.Engine(
        model_path=args.target,
        speculative_algorithm="dustin",
        speculative_draft_model_path=args.draft,
        speculative_num_steps=args.steps,
        speculative_eagle_topk=args.topk,
        speculative_num_draft_tokens=args.steps + 1 if args.topk == 1 else args.topk * args.steps,
        max_running_requests=1,
        skip_tokenizer_init=True,
        grammar_backend="none",
        log_level="warning",
        **device,
    )
    sampling = dict(temperature=0, max_new_tokens=args.new_tokens, ignore_eos=True)
    try:
        rows = []
        for question, prompt in zip(QUESTIONS, prompts, strict=False):
            output = engine.generate(input_ids=prompt, sampling_params=sampling)
            verifications = output["meta_info"]["spec_verify_ct"]
            rows.append(
                dict(
                    mode=mode,
                    question=question,
                    context_tokens=len(prompt),
                    new_tokens=len(output["output_ids"]),
                    verifications=verifications,
                    accept_length=round(output["meta_info"]["spec_accept_length"], 3),
                    answer=tokenizer.decode(output["output_ids"], skip_special_tokens=True),
                )
            )
            print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        engine.shutdown()


def main() -> None:
    """Measure every mode and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=".models/smollm2")
    parser.add_argument("--draft", default=".models/smollm2-draft26")
    parser.add_argument("--modes", nargs="+", choices=SPARSE_DRAFT_MODES, default=list(SPARSE_DRAFT_MODES))
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="ask only the first questions")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer, document = AutoTokenizer.from_pretrained(args.target), load_case().document
    messages = [[{"role": "user", "content": f"{document}\n\n{q}"}] for q in QUESTIONS[: args.prompts]]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    rows = [row for mode in args.modes for row in measure(mode, prompts, tokenizer, args)]
    accepted = summarise(rows)
    for mode, length in accepted.items():
        print(f"{mode:10} accept length {length:.3f}")
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        result = dict(run=describe_run(), settings=settings, accept_length=accepted, rows=rows)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens a verification over all prompts, a mode."""
    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        tokens, verifications = totals.get(row["mode"], (0.0, 0))
        steps = row["verifications"]
        totals[row["mode"]] = tokens + row["accept_length"] * steps, verifications + steps
    return {mode: round(tokens / verifications, 3) for mode, (tokens, verifications) in totals.items()}


def describe_run() -> dict[str, Any]:
    """Machine, versions, command and commit of this run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return dict(
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        versions={name: version(name) for name in ("torch", "sglang")},
        command=" ".join(sys.argv),
        commit=os.environ.get("DUSTIN_COMMIT", commit or "unknown"),
        date=time.strftime("%Y-%m-%d"),
    )


if __name__ == "__main__":
    main()
