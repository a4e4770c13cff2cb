"""Prompts for the tiny tokenizer."""


def words(count: int, first: int = 3, step: int = 7) -> str:
    """A prompt of `count` words that the tiny tokenizer knows."""
    return " ".join(f"w{3 + (first + i * step) % 250}" for i in range(count))
