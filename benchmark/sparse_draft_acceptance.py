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
from typing import Any

from demo_questions import QUESTIONS, add_options, longest, make_prompts, write_result
from real_engine import start_engine

from dustin_sglang.config import SPARSE_DRAFT_MODES


def measure(mode: str, prompts: list[list[int]], tokenizer: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer every prompt with one engine; a row a prompt."""
    os.environ |= {"DUSTIN_SPARSE_DRAFT": mode, "DUSTIN_BUDGET": str(args.budget)}
    engine = start_engine(args, longest(prompts, args))
    sampling = dict(temperature=0, max_new_tokens=args.new_tokens, ignore_eos=True)
    try:
        rows = []
        for question, prompt in zip(QUESTIONS, prompts, strict=False):
            output = engine.generate(input_ids=prompt, sampling_params=sampling)
            rows.append(
                dict(
                    mode=mode,
                    question=question,
                    context_tokens=len(prompt),
                    new_tokens=len(output["output_ids"]),
                    verifications=output["meta_info"]["spec_verify_ct"],
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
    add_options(parser, new_tokens=64)
    parser.add_argument("--modes", nargs="+", choices=SPARSE_DRAFT_MODES, default=list(SPARSE_DRAFT_MODES))
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = make_prompts(tokenizer, args.prompts)
    rows = [row for mode in args.modes for row in measure(mode, prompts, tokenizer, args)]
    accepted = summarise(rows)
    for mode, length in accepted.items():
        print(f"{mode:10} accept length {length:.3f}")
    write_result(args, accept_length=accepted, rows=rows)


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens a verification over all prompts, a mode."""
    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        tokens, verifications = totals.get(row["mode"], (0.0, 0))
        steps = row["verifications"]
        totals[row["mode"]] = tokens + row["accept_length"] * steps, verifications + steps
    return {mode: round(tokens / verifications, 3) for mode, (tokens, verifications) in totals.items()}


if __name__ == "__main__":
    main()
