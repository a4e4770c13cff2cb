"""What rectification costs and gains, on real models over a real text.

    python3 benchmark/rectification.py --json benchmark/results/rectification.json
    PYTHONPATH=benchmark python3 -m dustin_sglang.cpu rectification --json ...    # without a GPU

One engine for each --dustin-rectify-interval answers the same questions about the demo's document, greedily. Quality is
judged by the target itself, read densely by transformers over the prompt and each answer: the share of the answer's
tokens that it would have chosen there too, and its mean log-probability of them. Cost is the time from the first to the
last token; the prompt is in the radix cache by then.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from demo_questions import QUESTIONS, add_options, longest, make_prompts, write_result
from dense_judge import judge, load_judge
from real_engine import start_engine


def answer(interval: int, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer every prompt with one engine; a row a prompt."""
    os.environ |= {"DUSTIN_RECTIFY_INTERVAL": str(interval), "DUSTIN_BUDGET": str(args.budget)}
    engine = start_engine(args, longest(prompts, args))
    try:
        rows = []
        for question, prompt in zip(QUESTIONS, prompts, strict=False):
            engine.generate(input_ids=prompt, sampling_params=dict(temperature=0, max_new_tokens=1))
            start = time.perf_counter()
            sampling = dict(temperature=0, max_new_tokens=args.new_tokens, ignore_eos=True)
            output = engine.generate(input_ids=prompt, sampling_params=sampling)
            seconds = time.perf_counter() - start
            rows.append(
                dict(
                    interval=interval,
                    question=question,
                    context_tokens=len(prompt),
                    answer=output["output_ids"],
                    seconds=round(seconds, 2),
                    verifications=output["meta_info"]["spec_verify_ct"],
                    accept_length=round(output["meta_info"]["spec_accept_length"], 3),
                )
            )
        return rows
    finally:
        engine.shutdown()


def judge_rows(rows: list[dict[str, Any]], prompts: list[list[int]], tokenizer: Any, args: argparse.Namespace) -> None:
    """Add what the dense target says about each answer, and replace its ids by text."""
    model = load_judge(args.target)
    prompt_of = dict(zip(QUESTIONS, prompts, strict=False))
    for row in rows:
        agrees, logprobs = judge(model, prompt_of[row["question"]], row["answer"])
        row["agreement"] = round(agrees.float().mean().item(), 4)
        row["logprob"] = round(logprobs.mean().item(), 4)
        row["answer"] = tokenizer.decode(row["answer"], skip_special_tokens=True)
        print(json.dumps(row), flush=True)


def main() -> None:
    """Measure every interval and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, new_tokens=192)
    parser.add_argument("--intervals", nargs="+", type=int, default=[0, 16, 64])
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = make_prompts(tokenizer, args.prompts)
    rows = [row for interval in args.intervals for row in answer(interval, prompts, args)]
    judge_rows(rows, prompts, tokenizer, args)
    summary = {interval: summarise([row for row in rows if row["interval"] == interval]) for interval in args.intervals}
    for interval, means in summary.items():
        print(f"interval {interval:3}  " + "  ".join(f"{name} {value}" for name, value in means.items()))
    write_result(args, summary=summary, rows=rows)


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over questions."""
    names = ("agreement", "logprob", "accept_length", "seconds")
    return {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in names}


if __name__ == "__main__":
    main()
