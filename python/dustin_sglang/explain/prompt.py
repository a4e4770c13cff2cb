"""The request as tokens, and tokens as pieces of text."""

from __future__ import annotations

from typing import Any

PART_OF_CHARACTER = "\N{MIDDLE DOT}"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_TOKENS_A_CHARACTER = 8


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a user's message under the tokenizer's chat template; of the text itself where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text, verbose=False)["input_ids"])
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, in its context: concatenated they give the text.

    A character of several tokens belongs to the last of them; the others are shown as `PART_OF_CHARACTER`.
    """

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    result: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before, whole = decode(ids[start:read]), decode(ids[start:end])
        if whole.endswith(_REPLACEMENT) and end - read < _MOST_TOKENS_A_CHARACTER and end < len(ids):
            result.append(PART_OF_CHARACTER)
            continue
        result.append(whole[len(before) :])
        start, read = read, end
    return result


def pieces_behind(tokenizer: Any, before: list[int], tokens: list[int]) -> list[str]:
    """The texts of tokens that would follow others."""
    return pieces(tokenizer, [*before[-_MOST_TOKENS_A_CHARACTER:], *tokens])[-len(tokens) :]
