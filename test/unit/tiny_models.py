"""Tiny random models that SGLang loads like any other: for tests, on a CPU, without a download.

`write_llama` writes a whole model, `write_eagle` and `write_eagle3` draft heads for one. Scales are chosen so that
attention matters: outputs change when a KV slot is wrong, and the best logit is clear enough for float32 rounding not
to matter.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
# The last tokens of a vocabulary: enough for one JSON object.
JSON_TOKENS = ('{"a":', '"x"', "}")


@dataclass(frozen=True)
class TinyLlama:
    """Shape and seed of a random Llama.

    Attributes
    ----------
    qk_gain : float
        Scale of queries and keys; scores have a standard deviation of about its square, so larger is sharper attention.
    bigram : float
        Pull towards one fixed successor for each token. The successors depend on ``vocab_size`` alone, so models of any
        shape and seed that share a vocabulary draft well for each other when both have it; 0 makes unrelated models.
    """

    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 256
    max_position: int = 4096
    seed: int = 0
    qk_gain: float = 1.5
    bigram: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert self.head_dim % 2 == 0  # RoPE rotates pairs
        assert self.vocab_size > len(SPECIAL_TOKENS)

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return 2 * self.hidden_size


def write_llama(folder: Path, shape: TinyLlama | None = None) -> Path:
    """Write a random Llama with its tokenizer.

    Returns
    -------
    Path
        ``folder``, made if need be; pass it as ``--model-path``.
    """
    shape = shape or TinyLlama()
    random = _Random(shape.seed)
    weights = {f"model.{name}": w for name, w in _layers(shape, random, shape.num_layers, shape.hidden_size).items()}
    embed = random.normal(shape.vocab_size, shape.hidden_size)
    weights["model.embed_tokens.weight"] = embed
    weights["model.norm.weight"] = torch.ones(shape.hidden_size)
    towards_successor = embed[successors(shape.vocab_size).argsort()]
    head = random.normal(shape.vocab_size, shape.hidden_size) + shape.bigram * towards_successor
    weights["lm_head.weight"] = head / shape.hidden_size**0.5
    return _save(folder, shape, weights, _config(shape, "LlamaForCausalLM", shape.num_layers))


def write_eagle(folder: Path, target: TinyLlama, num_layers: int = 1, seed: int = 1) -> Path:
    """Write a random EAGLE head for ``target``; it takes embeddings and output head from there."""
    random, hidden = _Random(seed), target.hidden_size
    weights = _layers(target, random, num_layers, hidden)
    # The first layer of an EAGLE head has no input norm.
    del weights["layers.0.input_layernorm.weight"]
    # A head for a target with successors passes the token's embedding on, which is what the output head needs.
    mix = random.normal(hidden, 2 * hidden) / (2 * hidden) ** 0.5
    weights["fc.weight"] = mix + target.bigram * torch.eye(hidden, 2 * hidden)
    weights["fc.bias"] = torch.zeros(hidden)
    return _save(folder, target, weights, _config(target, "LlamaForCausalLMEagle", num_layers))


def write_eagle3(folder: Path, target: TinyLlama, draft_vocab_size: int | None = None, seed: int = 1) -> Path:
    """Write a random EAGLE-3 head for ``target``.

    Parameters
    ----------
    draft_vocab_size : int, optional
        Number of target tokens that the head can draft; by default a quarter of them, spread over the vocabulary.
    """
    assert target.num_layers >= 4, "an EAGLE-3 head reads three layers of the target"
    random, hidden = _Random(seed), target.hidden_size
    layer = _layers(target, random, 1, 2 * hidden)
    weights = {name.replace("layers.0", "midlayer"): w for name, w in layer.items()}
    weights["midlayer.input_layernorm.weight"] = torch.ones(hidden)
    weights["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = random.normal(hidden, 3 * hidden) / (3 * hidden) ** 0.5

    drafted = draft_vocab_size or target.vocab_size // 4
    tokens = torch.arange(drafted) * target.vocab_size // drafted
    weights["lm_head.weight"] = random.normal(drafted, hidden) / hidden**0.5
    weights["d2t"] = tokens - torch.arange(drafted)
    weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    last = target.num_layers
    extra = {
        "draft_vocab_size": drafted,
        "target_hidden_size": hidden,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, last // 2 - 1, last - 2],
        },
    }
    return _save(folder, target, weights, _config(target, "LlamaForCausalLMEagle3", 1) | extra)


def successors(vocab_size: int) -> torch.Tensor:
    """The token that ``bigram`` pulls towards after each token: int64 ``[vocab_size]``, a permutation of the tokens."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of ``<unk>``, ``<s>``, ``</s>``, words and `JSON_TOKENS`: word ``wN`` is token N."""
    words = [f"w{token}" for token in range(len(SPECIAL_TOKENS), vocab_size - len(JSON_TOKENS))]
    words = [*SPECIAL_TOKENS, *words, *JSON_TOKENS]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class _Random:
    """Standard normal tensors from a seed of their own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator)

    def linear(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """Weight that keeps the scale of its input, times ``gain``."""
        return self.normal(outputs, inputs) * (gain / math.sqrt(inputs))


def _layers(shape: TinyLlama, random: _Random, num_layers: int, attention_input: int) -> dict[str, torch.Tensor]:
    """Decoder layers, named from ``layers.0`` on; ``attention_input`` is the width of what q, k and v are made of."""
    hidden, heads, kv_heads, head_dim = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    weights: dict[str, torch.Tensor] = {}
    for i in range(num_layers):
        weights |= {
            f"layers.{i}.self_attn.q_proj.weight": random.linear(heads * head_dim, attention_input, shape.qk_gain),
            f"layers.{i}.self_attn.k_proj.weight": random.linear(kv_heads * head_dim, attention_input, shape.qk_gain),
            f"layers.{i}.self_attn.v_proj.weight": random.linear(kv_heads * head_dim, attention_input),
            f"layers.{i}.self_attn.o_proj.weight": random.linear(hidden, heads * head_dim),
            f"layers.{i}.mlp.gate_proj.weight": random.linear(shape.intermediate_size, hidden),
            f"layers.{i}.mlp.up_proj.weight": random.linear(shape.intermediate_size, hidden),
            f"layers.{i}.mlp.down_proj.weight": random.linear(hidden, shape.intermediate_size),
            f"layers.{i}.input_layernorm.weight": torch.ones(hidden),
            f"layers.{i}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    return weights


def _config(shape: TinyLlama, architecture: str, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save(folder: Path, shape: TinyLlama, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, shape.vocab_size)
    return folder
