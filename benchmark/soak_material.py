"""What the requests of a soak are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from dustin_sglang.demo.case import load_case

Sampling = dict[str, Any]


@dataclass(frozen=True)
class Material:
    """What requests are made of.

    Attributes
    ----------
    tokens
        Prompts are cut from these, read in a circle.
    ends
        Tokens that end an answer.
    forced
        A token for logit_bias to force.
    grammars
        Sampling parameters of a grammar, and the regular expression that answers match, white space left out.
    options
        Sampling parameters of which only the answer's length is known.
    """

    tokens: list[int]
    ends: frozenset[int]
    forced: int
    grammars: list[tuple[Sampling, str]]
    options: list[Sampling]

    def prompt(self, start: int, length: int) -> list[int]:
        """`length` tokens from position `start`."""
        return [self.tokens[(start + i) % len(self.tokens)] for i in range(length)]


def real_material(model: str) -> Material:
    """Return requests about the demo's chapter, for a model of natural language."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = AutoConfig.from_pretrained(model).eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    schema = '{"type": "object", "properties": {"name": {"enum": ["Anne", "Jane"]}}, "required": ["name"]}'
    return Material(
        tokens=tokenizer.encode(load_case().document),
        ends=frozenset(ends),
        forced=tokenizer.encode(" the")[-1],
        grammars=[
            ({"regex": "[0-9]{3}-[a-f]{5}"}, "[0-9]{3}-[a-f]{5}"),
            ({"ebnf": 'root ::= ("yes" | "no") "." [a-c]'}, r"(yes|no)\.[a-c]"),
            ({"json_schema": schema}, r'\{"name":"(Anne|Jane)"\}'),
        ],
        options=[
            {"temperature": 1, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 20},
            {"frequency_penalty": 1},
            {"repetition_penalty": 1.2, "temperature": 1},
            {"stop": ["the", "."]},
            {"min_new_tokens": 8},
            {"ignore_eos": True},
        ],
    )
