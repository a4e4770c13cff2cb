"""The demo's document and question: dense and sparse verification find the phrase, sinks and window do not.

One engine prefills the document once; the prompt's KV is exact, so the radix cache hands it to the other policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import CHAIN
from scheduler_harness import Engine, in_child

from dustin_sglang.demo.case import load_case

MODELS = Path(__file__).parents[2] / ".models"
POLICIES = ("hybrid-sum", "dense", "streaming")
BUDGET, NEW_TOKENS = 512, 40


def answers(prompt: list[int]) -> dict[str, Any]:
    from dustin_sglang.selection.policies import POLICIES as policies

    engine = Engine(
        model_path=str(MODELS / "smollm2"),
        speculative_draft_model_path=str(MODELS / "smollm2-draft26"),
        speculative_algorithm="dustin",
        max_total_tokens=8192,
        mem_fraction_static=0.4,
        **CHAIN,
    )
    wiring, result = engine.worker._wiring, {}
    selector, share = wiring.selector, wiring.profile.lookahead_share
    for name in POLICIES:
        selector.policy = policies[name]()
        selector.budget = selector.policy.budget(BUDGET, 4, 64, share)
        engine.add(name, prompt, NEW_TOKENS, stop_token_ids=[2])
        engine.run()
        result[name] = (engine.output(name), engine.request(name).cached_tokens)
    return result


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "smollm2")
    case = load_case(None, None, None)
    messages = [{"role": "user", "content": case.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    result = in_child(answers, prompt, timeout=540)
    texts = {name: tokenizer.decode(ids, skip_special_tokens=True) for name, (ids, _) in result.items()}
    cached = {name: count for name, (_, count) in result.items()}
    return dict(case=case, prompt=prompt, texts=texts, cached=cached)


def test_the_document_is_long_and_the_phrase_far_from_its_ends(outcome: dict[str, Any]) -> None:
    assert len(outcome["prompt"]) >= 4000
    assert 0.3 < outcome["case"].depth < 0.8


@pytest.mark.parametrize("policy, found", [("hybrid-sum", True), ("dense", True), ("streaming", False)])
def test_who_finds_the_phrase(outcome: dict[str, Any], policy: str, found: bool) -> None:
    assert (outcome["case"].expected in outcome["texts"][policy]) is found, outcome["texts"]


def test_the_later_policies_reused_the_exact_prompt(outcome: dict[str, Any]) -> None:
    # SGLang leaves the last token to be prefilled, and a bigram key covers one token less.
    reused = len(outcome["prompt"]) - 2
    assert outcome["cached"] == {"hybrid-sum": 0, "dense": reused, "streaming": reused}
