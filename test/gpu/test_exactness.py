"""A budget of at least the context gives dense speculation's tokens, with graphs and overlap on and off.

Our kernel adds in another order than FlashInfer does; under ``--dustin-attention flashinfer`` the mask alone differs
from SGLang's verification (causal instead of a custom mask). Tokens are expected to agree. Where two runs part, the
tokens must have been a tie within bf16 rounding: each first divergence is checked, and printed.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from dustin_sglang.demo.case import load_case

engines = pytest.importorskip("engines", reason="needs SGLang with CUDA", exc_type=ImportError)
pytestmark = pytest.mark.gpu

# bf16 keeps 8 bits of mantissa: logits of about 16 are 1/16 apart, and a sum over layers moves them by a few steps.
NEAR_TIE = 0.25
# SGLang's own dense speculation against no speculation, none of our code: in the recorded runs one request parts at a
# gap of exactly 0.5 nats. This bound was set after that was seen, so it watches for worse and explains nothing.
STOCK_TIE = 0.5
NEW_TOKENS = 48
EXACT = {"DUSTIN_BUDGET": "8192"}
# A draft that reads wrong slots still gives right tokens; only fewer of its own are accepted.
SAME_DRAFTS = 0.3


def prompts() -> list[list[int]]:
    """Mixed lengths, the last a real text of 6,000 tokens with a question about it."""
    draw = random.Random(7)
    return [[draw.randrange(1000, 40000) for _ in range(n)] for n in (33, 300, 511, 1200, 2500)] + [real_prompt()]


def real_prompt() -> list[int]:
    """The demo's chapter, then its beginning again, and the demo's question."""
    case = load_case()
    text = tokenizer().encode(case.document)
    long_text = tokenizer().decode(text + text[: 6000 - len(text)])
    messages = [{"role": "user", "content": f"{long_text}\n\n{case.question}"}]
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(engines.MODEL)


@pytest.fixture(scope="module")
def dense() -> list[dict[str, Any]]:
    with engines.engine("STANDALONE") as running:
        return engines.greedy(running, prompts(), NEW_TOKENS)


def check(name: str, got: list[dict[str, Any]], want: list[dict[str, Any]], stock: bool = False) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        at = next((j for j, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=True)) if x != y), None)
        print(f"{name} request {i}: accept length {a['accept_length']:.2f}, first divergence {at}", end="")
        if at is not None:
            print(f", gap {b['gaps'][at]:.4f}", end="")
            gap = b["gaps"][at]
            assert gap <= STOCK_TIE if stock else gap < NEAR_TIE, f"{name} request {i} parts at token {at}: no tie"
        print()


def test_dense_speculation_agrees_with_none(dense: list[dict[str, Any]]) -> None:
    with engines.engine(None) as running:
        plain = [g | {"accept_length": 1.0} for g in engines.greedy(running, prompts(), NEW_TOKENS)]
    check("no speculation", plain, dense, stock=True)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("graphs and overlap", {}),
        ("no graphs", {"disable_cuda_graph": True}),
        ("no overlap", {"disable_overlap_schedule": True}),
        ("page size 16", {"page_size": 16}),
        ("two groups of layers", {"env": EXACT | {"DUSTIN_LAYER_GROUPS": "2"}}),
        ("four groups, FlashInfer", {"env": EXACT | {"DUSTIN_LAYER_GROUPS": "4", "DUSTIN_ATTENTION": "flashinfer"}}),
        ("half of the mass", {"env": EXACT | {"DUSTIN_MASS": "0.5", "DUSTIN_LAYER_GROUPS": "2"}}),
        ("FlashInfer", {"env": EXACT | {"DUSTIN_ATTENTION": "flashinfer"}}),
        ("FlashInfer, no graphs", {"env": EXACT | {"DUSTIN_ATTENTION": "flashinfer"}, "disable_cuda_graph": True}),
    ],
)
def test_budget_of_the_context_is_dense(name: str, kwargs: dict[str, Any], dense: list[dict[str, Any]]) -> None:
    with engines.engine("dustin", **({"env": EXACT} | kwargs)) as running:
        check(name, engines.greedy(running, prompts(), NEW_TOKENS), dense)


@pytest.mark.parametrize("kwargs", [{}, {"disable_cuda_graph": True}], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("mode", ["all", "unscored"])
def test_a_sparse_draft_drafts_as_a_dense_one_within_the_budget(
    mode: str, kwargs: dict[str, Any], dense: list[dict[str, Any]]
) -> None:
    with engines.engine("dustin", env=EXACT | {"DUSTIN_SPARSE_DRAFT": mode}, **kwargs) as running:
        got = engines.greedy(running, prompts(), NEW_TOKENS)
    check(f"sparse draft, {mode}", got, dense)
    sparse_length, dense_length = (sum(g["accept_length"] for g in run) / len(run) for run in (got, dense))
    assert abs(sparse_length - dense_length) < SAME_DRAFTS


@pytest.mark.parametrize("kwargs", [{}, {"disable_cuda_graph": True}], ids=["graphs", "no graphs"])
def test_tree_agrees_with_the_chain(kwargs: dict[str, Any], dense: list[dict[str, Any]]) -> None:
    tree = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
    with engines.engine("dustin", env=EXACT, **tree, **kwargs) as running:
        check("tree", engines.greedy(running, prompts(), NEW_TOKENS), dense)


def test_a_sparsely_drafted_tree_of_pages_agrees_with_the_chain(dense: list[dict[str, Any]]) -> None:
    tree = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6, page_size=16)
    with engines.engine("dustin", env=EXACT | {"DUSTIN_SPARSE_DRAFT": "all"}, **tree) as running:
        got = engines.greedy(running, prompts(), NEW_TOKENS)
    check("sparse draft, tree", got, dense)
    dense_length = sum(d["accept_length"] for d in dense)
    assert sum(g["accept_length"] for g in got) > dense_length - SAME_DRAFTS * len(dense), "two branches find no fewer"


@pytest.mark.parametrize(
    "env",
    [
        {"DUSTIN_LAYER_GROUPS": "4"},
        {"DUSTIN_LAYER_GROUPS": "4", "DUSTIN_ATTENTION": "flashinfer"},
        {"DUSTIN_LAYER_GROUPS": "2", "DUSTIN_POLICY": "hybrid-depth"},
        {"DUSTIN_MASS": "0.8", "DUSTIN_LAYER_GROUPS": "2", "DUSTIN_SPARSE_DRAFT": "all"},
    ],
    ids=lambda env: " ".join(f"{name[7:].lower()} {value}" for name, value in env.items()),
)
@pytest.mark.parametrize("kwargs", [{}, {"disable_cuda_graph": True}], ids=["graphs", "no graphs"])
def test_requests_within_the_budget_are_exact_beside_lists_of_groups_and_ending_lists(
    env: dict[str, str], kwargs: dict[str, Any], dense: list[dict[str, Any]]
) -> None:
    with engines.engine("dustin", env={"DUSTIN_BUDGET": "512"} | env, **kwargs) as running:
        got = engines.greedy(running, prompts(), NEW_TOKENS)
    short = [i for i, p in enumerate(prompts()) if len(p) + NEW_TOKENS <= 512]
    check(str(env), [got[i] for i in short], [dense[i] for i in short])
    assert all(len(g["ids"]) == NEW_TOKENS and g["accept_length"] > 1 for g in got)


def test_sparse_run_at_6k(dense: list[dict[str, Any]]) -> None:
    """A budget of 512: requests within it stay exact; what the long one answers is printed beside the dense answer.

    Whether either answer is right is not this test's matter: 6,000 tokens in bf16 are at the end of what this model can
    do, and stock speculation itself has answered rightly in one recorded run and wrongly in the next.
    """
    with engines.engine("dustin", env={"DUSTIN_BUDGET": "512"}) as running:
        got = engines.greedy(running, prompts(), NEW_TOKENS)
    for name, result in (("dense", dense[-1]), ("512 of 6,000", got[-1])):
        answer = tokenizer().decode(result["ids"], skip_special_tokens=True)
        found = load_case().expected in answer
        print(f"{name}: accept length {result['accept_length']:.2f}, found {found}, answer {answer!r}")
    short = [i for i, p in enumerate(prompts()) if len(p) + NEW_TOKENS <= 512]
    check("under the budget", [got[i] for i in short], [dense[i] for i in short])
    assert all(len(g["ids"]) == NEW_TOKENS and g["accept_length"] > 1 for g in got)
