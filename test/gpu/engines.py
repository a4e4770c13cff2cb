"""Engines on the GPU for the tests here: one at a time, real weights, token ids in and out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import sglang as sgl

MODEL = os.environ.get("DUSTIN_TEST_MODEL", ".models/smollm2")
DRAFT = os.environ.get("DUSTIN_TEST_DRAFT", ".models/smollm2-draft26")


@contextlib.contextmanager
def engine(algorithm: str | None, *, env: dict[str, str] | None = None, **kwargs: Any) -> Iterator[sgl.Engine]:
    """A running `sgl.Engine`; `env` holds the ``DUSTIN_*`` settings of this launch alone."""
    settings: dict[str, Any] = dict(
        model_path=MODEL,
        dtype="bfloat16",
        attention_backend="flashinfer",
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=[1, 4, 8],  # six requests, and fewer as they end, run in padded graphs
        max_running_requests=16,
        mem_fraction_static=0.9,
        max_total_tokens=65536,  # far from the memory's end, so that test files can run side by side
        grammar_backend="none",
        skip_tokenizer_init=True,
        log_level="info",
    )
    if algorithm is not None:
        settings |= dict(
            speculative_algorithm=algorithm,
            speculative_draft_model_path=DRAFT,
            speculative_num_steps=3,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=4,
        )
    saved = dict(os.environ)
    os.environ.update(env or {})
    running = sgl.Engine(**(settings | kwargs))
    try:
        yield running
    finally:
        running.shutdown()
        os.environ.clear()
        os.environ.update(saved)


def greedy(running: sgl.Engine, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Greedy continuations with the two best log-probabilities of every token.

    Returns
    -------
    list of dict
        ``ids``, ``gaps`` (best minus second best log-probability, nats, a token) and ``accept_length``.
    """
    outputs = running.generate(
        input_ids=prompts,
        sampling_params=dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True),
        return_logprob=True,
        top_logprobs_num=2,
    )
    return [
        dict(
            ids=o["output_ids"],
            gaps=[top[0][0] - top[1][0] for top in o["meta_info"]["output_top_logprobs"]],
            accept_length=o["meta_info"].get("spec_accept_length"),
        )
        for o in outputs
    ]
