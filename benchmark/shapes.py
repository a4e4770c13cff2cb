"""Model shapes: folders with a config.json alone, for engines with dummy weights, and attention shapes of one rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = 2  # bf16, as everything here

_LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    max_position_embeddings=132096,  # 128k and an answer
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    vocab_size=128256,
    attention_bias=False,
    mlp_bias=False,
)
_QWEN: dict[str, Any] = _LLAMA | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=152064
)


def _model(family: dict[str, Any], hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    return family | dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
    )


# The drafts are Qwen2.5-0.5B, Qwen2.5-1.5B and Llama-3.2-1B in shape; `write_shape` gives them the target's vocabulary.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _model(_LLAMA, 4096, 14336, 32, 32, 8),
    "qwen2.5-14b": _model(_QWEN, 5120, 13824, 48, 40, 8),
    "qwen2.5-72b": _model(_QWEN, 8192, 29568, 80, 64, 8),
    "draft-0.5b": _model(_LLAMA, 896, 4864, 24, 14, 2),
    "draft-1b": _model(_LLAMA, 2048, 8192, 16, 32, 8),
    "draft-1.5b": _model(_LLAMA, 1536, 8960, 28, 12, 2),
}
# 14 heads do not divide by 4 ranks, so the shards take another draft.
_SHARD_DRAFTS = {"llama-3.1-8b": "draft-1b", "qwen2.5-14b": "draft-1.5b", "qwen2.5-72b": "draft-1.5b"}


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention looks like.

    Attributes
    ----------
    layers, heads, kv_heads, head_dim
        Of the rank: heads are divided by `tp`, and KV heads too where there are enough.
    tp
        Tensor-parallel ranks.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tp: int = 1

    @classmethod
    def of(cls, name: str, tp: int = 1) -> AttentionShape:
        """Return the shape of model `name` on one of `tp` ranks."""
        config = SHAPES[name]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if heads % tp:
            raise ValueError(f"{name} has {heads} heads; they cannot be divided by {tp} ranks")
        return cls(config["num_hidden_layers"], heads // tp, max(1, kv_heads // tp), config["head_dim"], tp)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.layers * self.layer_bytes


# Name of an attention shape: target and draft of one rank.
ATTENTION_SHAPES: dict[str, tuple[AttentionShape, AttentionShape]] = {
    name: (AttentionShape.of(name), AttentionShape.of("draft-0.5b")) for name in _SHARD_DRAFTS
} | {f"{name}-tp4": (AttentionShape.of(name, 4), AttentionShape.of(draft, 4)) for name, draft in _SHARD_DRAFTS.items()}


def write_shape(name: str, root: Path, vocab_size: int | None = None) -> Path:
    """Write the folder of shape `name` under `root`, with another vocabulary if one is given, and return it."""
    config = SHAPES[name] | ({} if vocab_size is None else {"vocab_size": vocab_size})
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
