"""Tiny models that read any text byte by byte: for kits whose prompts, grammars and stop strings are English."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from launch import DRAFT, TARGET
from tiny_models import SPECIAL_TOKENS, write_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 2048  # some kits send ids of up to 1999; tokens without a byte spell themselves
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def write_byte_pair(folder: Path) -> dict[str, str]:
    """Write a target and a whole-model draft; return their folders by role."""
    pair = {}
    for role, shape in (("target", TARGET), ("draft", DRAFT)):
        path = write_llama(folder / role, replace(shape, vocab_size=VOCAB_SIZE, bigram=2.0))
        _write_tokenizer(path)
        pair[role] = str(path)
    return pair


def _write_tokenizer(folder: Path) -> None:
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{token}" for token in range(len(tokens), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
