"""Model shapes for speed runs: folders that hold a config.json alone, to be loaded with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

_LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    max_position_embeddings=131072,
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
SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    # Qwen2.5-0.5B's shape, with the target's vocabulary: what a draft of the same family would look like.
    "draft-0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
    ),
}


def write_shape(name: str, root: Path) -> Path:
    """Write the folder of shape `name` under `root` and return it."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_LLAMA | SHAPES[name]))
    return folder
