"""The draft's KV is shifted by one: a lookahead score at slot j speaks for position j + 1.

A model built by hand, target and draft alike: every query looks for one marker token and nothing else, and what the
model says next depends on whether its attention found the marker. Verification may read three positions: the first,
the last, and the one that lookahead chooses. In the draft's KV the marker lies one slot early, so the right token comes
out only if the score is moved by one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import CHAIN
from safetensors.torch import save_file
from scheduler_harness import Engine, in_child

VOCAB, WIDTH, HEAD = 32, 16, 16
MARKER, FOUND, MISSED = 20, 5, 6
MARKER_AT = 37
PROMPT = [3 + i % 2 for i in range(60)]
PROMPT[MARKER_AT] = MARKER


def write_marker_model(folder: Path) -> str:
    """One layer, one head, no MLP.

    Channel 0 is 1 in every embedding, channel 1 marks the marker, channel 2 carries "found". Queries and keys use the
    slowest rotary pair, which at this base does not turn within a context, so a score does not depend on distance.
    """
    folder.mkdir(parents=True)
    slow = HEAD // 2 - 1
    embed = torch.zeros(VOCAB, WIDTH)
    embed[:, 0] = 1
    embed[MARKER, 1] = 1
    weights = {name: torch.zeros(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    weights["q"][slow, 0] = 10
    weights["k"][slow, 1] = 10
    weights["v"][0, 1] = 1
    weights["o"][2, 0] = 10
    head = torch.zeros(VOCAB, WIDTH)
    head[MISSED, 0] = 1  # channel 0 of a normalised hidden state is at most 4, of channel 2 up to 4 too
    head[FOUND, 2] = 10
    state = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(WIDTH), "lm_head.weight": head}
    layer = "model.layers.0."
    state |= {f"{layer}self_attn.{name}_proj.weight": w for name, w in weights.items()}
    state |= {f"{layer}mlp.{name}_proj.weight": torch.zeros(WIDTH, WIDTH) for name in ("gate", "up", "down")}
    state |= {f"{layer}{name}.weight": torch.ones(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        rope_theta=1e12,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def generate(model: str, shift: int) -> dict[str, object]:
    engine = Engine(
        model_path=model,
        speculative_algorithm="dustin",
        speculative_draft_model_path=model,
        max_total_tokens=512,
        **CHAIN,
    )
    selector, lists = engine.worker._wiring.selector, []
    selector._lookahead._shift = shift
    select = selector.select

    def recorded(*args: object, **kwargs: object) -> object:
        selection = select(*args, **kwargs)
        lists.append(selection.positions[0, 0].tolist())
        return selection

    selector.select = recorded
    return dict(tokens=engine.generate({"r": PROMPT}, 9)["r"], first_list=lists[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_marker_model(tmp_path_factory.mktemp("marker") / "model")


ENV = {"DUSTIN_BUDGET": "3", "DUSTIN_SINKS": "1", "DUSTIN_WINDOW": "1"}


def test_lookahead_finds_the_marker_where_the_target_has_it(model: str) -> None:
    result = in_child(generate, model, 1, env=ENV | {"DUSTIN_POLICY": "lookahead"})
    assert result["first_list"] == [0, MARKER_AT, len(PROMPT) - 1]
    assert result["tokens"] == [FOUND] * 9


def test_without_the_shift_it_misses(model: str) -> None:
    result = in_child(generate, model, 0, env=ENV | {"DUSTIN_POLICY": "lookahead"})
    assert result["first_list"] == [0, MARKER_AT - 1, len(PROMPT) - 1]
    assert result["tokens"] == [FOUND] + [MISSED] * 8, "only the first token, which the dense prefill gives, is right"


def test_history_finds_it_in_the_targets_own_keys(model: str) -> None:
    result = in_child(generate, model, 1, env=ENV | {"DUSTIN_POLICY": "history"})
    assert result["first_list"] == [0, MARKER_AT, len(PROMPT) - 1]
    assert result["tokens"] == [FOUND] * 9


def test_streaming_cannot_find_it(model: str) -> None:
    result = in_child(generate, model, 1, env=ENV | {"DUSTIN_POLICY": "streaming"})
    assert result["first_list"] == [0, len(PROMPT) - 2, len(PROMPT) - 1]
    assert result["tokens"] == [FOUND] + [MISSED] * 8
