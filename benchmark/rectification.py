"""What rectification costs and gains: an engine for each --dustin-rectify-interval goes on with the same excerpts.

    python3 benchmark/rectification.py --text NOVEL.txt... --json benchmark/results/rectification.json
    PYTHONPATH=benchmark python3 -m dustin_sglang.cpu rectification --text NOVEL.txt... --json ...    # without a GPU

--batch requests run at a time and give --new-tokens tokens each, whatever ends them. A row is an interval, or dense
verification in the end, the floor of what rounding alone does:

    policy, k, interval, context, new_tokens, batch    what was measured; interval 0: never rectified
    tokens_s, tokens_s_range     greedy, prompts in the radix cache: median, least and most of --repeats batches
    step_ms, accept_length       of the batch of the median: a round, and tokens a verification
    tokens_s_ratio, step_ratio   to interval 0
    prompts                      that were compared
    kl, agreement                of the later half of each sampled answer, against the dense target that reads the same
                                 tokens in float32: KL(dense || verified) in nats over the engine's best tokens and all
                                 others as one, a lower bound, and the share of places with the same best token
    kl_minus_never, agreement_minus_never   to interval 0; answers are sampled at temperature 1, each engine's its own
    ci                           95% intervals by bootstrap over prompts, paired where two engines are compared
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dense_judge import divergence, load_judge
from generation_answers import Setting
from quality_statistics import Bootstrap
from real_engine import add_pair_options, start_engine
from results import Deadline, Results, Row, add_run_options, describe_run

from dustin_sglang.calibrate.texts import Texts
from dustin_sglang.calibrate.trace import CalibrationError

KEY = ("policy", "k", "interval", "context", "new_tokens", "batch")
BEST = 20  # tokens whose log-probabilities the engine returns
Output = dict[str, Any]


def measure(setting: Setting, prompts: list[list[int]], args: argparse.Namespace) -> tuple[Row, list[Output]]:
    """Run one engine: the fields of what it costs, and a sampled answer to each prompt."""
    os.environ |= setting.environment(args.profile)
    engine = start_engine(args, args.context + args.new_tokens, args.batch)
    try:
        return time_batches(engine, prompts[: args.batch], args), sample(engine, prompts, args)
    finally:
        engine.shutdown()


def time_batches(engine: Any, prompts: list[list[int]], args: argparse.Namespace) -> Row:
    """Time `--repeats` greedy batches of prompts that are in the radix cache."""
    runs = []
    engine.generate(input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=1))
    sampling = dict(temperature=0, max_new_tokens=args.new_tokens, ignore_eos=True)
    for _ in range(args.repeats):
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
        tokens = sum(len(output["output_ids"]) for output in outputs)
        rounds = [output["meta_info"]["spec_verify_ct"] for output in outputs]
        # The first token of an answer is the prefill's.
        accepted = (tokens - len(outputs)) / sum(rounds)
        runs.append((tokens / seconds, 1000 * seconds / max(rounds), accepted))
    runs.sort()
    rate, step, accept_length = runs[len(runs) // 2]
    return dict(
        tokens_s=round(rate, 1),
        tokens_s_range=[round(runs[0][0], 1), round(runs[-1][0], 1)],
        step_ms=round(step, 3),
        accept_length=round(accept_length, 3),
    )


def sample(engine: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[Output]:
    """Sample an answer to each prompt, with the best tokens' log-probabilities, `--batch` at a time."""
    sampling = dict(temperature=1, max_new_tokens=args.new_tokens, ignore_eos=True)
    outputs: list[Output] = []
    for start in range(0, len(prompts), args.batch):
        outputs += engine.generate(
            input_ids=prompts[start : start + args.batch],
            sampling_params=sampling,
            return_logprob=True,
            top_logprobs_num=BEST,
        )
    return outputs


def judge_answers(prompts: list[list[int]], outputs: list[Output], args: argparse.Namespace) -> list[np.ndarray]:
    """KL and agreement ``[later places, 2]`` of each answer."""
    model, later = load_judge(args.target), args.new_tokens // 2
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        best = output["meta_info"]["output_top_logprobs"][later:]
        ids = [[token for _, token, *_ in row] for row in best]
        logprobs = [[logprob for logprob, *_ in row] for row in best]
        kl, agrees = divergence(model, prompt + output["output_ids"], ids, logprobs)
        found.append(np.stack([kl.numpy(), agrees.double().numpy()], axis=1))
    return found


def compare(cost: Row, judged: Sequence[np.ndarray], never: tuple[Row, Sequence[np.ndarray]] | None, seed: int) -> Row:
    """Fields of a row.

    Parameters
    ----------
    cost
        Of `time_batches`.
    judged
        Of `judge_answers`.
    never
        The same of the engine that never rectifies; None for that engine itself.
    """
    bootstrap = Bootstrap([len(values) for values in judged], seed)
    means = bootstrap.means(judged)
    statistics = dict(kl=means[:, 0], agreement=means[:, 1])
    ratios: Row = {}
    if never is not None:
        before = bootstrap.means(never[1])
        statistics |= dict(kl_minus_never=means[:, 0] - before[:, 0], agreement_minus_never=means[:, 1] - before[:, 1])
        ratios = dict(
            tokens_s_ratio=round(cost["tokens_s"] / never[0]["tokens_s"], 4),
            step_ratio=round(cost["step_ms"] / never[0]["step_ms"], 4),
        )
    values = {name: round(float(value[0]), 6) for name, value in statistics.items()}
    intervals = {name: bootstrap.interval(value) for name, value in statistics.items()}
    return cost | ratios | dict(prompts=len(judged)) | values | dict(ci=intervals)


def main() -> int:
    """Measure every interval, each row as it comes; return the exit status."""
    args = parse()
    from transformers import AutoTokenizer

    try:
        texts = Texts(args.text, AutoTokenizer.from_pretrained(args.target), args.context, 0, args.seed)
        prompts = [texts.draw(number, f"rectification {number}", args.context) for number in range(args.prompts)]
    except CalibrationError as error:
        print(error, file=sys.stderr)
        return 1
    deadline = Deadline(args.minutes)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings["text"] = [file.name for file in args.text]
    results = Results(args.json, KEY, settings, describe_run())
    never: tuple[Row, list[np.ndarray]] | None = None
    for setting in [*(Setting(args.policy, args.budget, interval) for interval in args.intervals), Setting("dense")]:
        if deadline.passed:
            print(f"time is up before {setting}")
            break
        cost, outputs = measure(setting, prompts, args)
        judged = judge_answers(prompts, outputs, args)
        key = dict(policy=setting.policy, k=setting.k, interval=setting.interval)
        key |= dict(context=args.context, new_tokens=args.new_tokens, batch=args.batch)
        row = key | compare(cost, judged, never, args.seed)
        never = never or (cost, judged)
        results.add(row)
        print(json.dumps(row), flush=True)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_options(parser)
    add_run_options(parser, "stop before the engine that would start later")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="long texts, excerpts of which are prompts")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--policy", default="hybrid-sum", help="as --dustin-policy")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--intervals", nargs="+", type=int, default=[64, 16], help="beside 0, which is always measured")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if min(args.prompts, args.batch, args.repeats) < 1 or args.new_tokens < 4:
        parser.error("--prompts, --batch and --repeats: at least 1; --new-tokens: at least 4")
    args.intervals = [0, *(interval for interval in args.intervals if interval)]
    return args


if __name__ == "__main__":
    sys.exit(main())
