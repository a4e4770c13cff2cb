"""Every refusal, through SGLang's own argument handling, and what the message tells the user to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from tiny_models import TinyLlama, write_eagle, write_eagle3, write_llama

from dustin_sglang import refusals
from dustin_sglang.draft_kind import DraftKind

load_plugins()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    shape = TinyLlama()
    folders = {
        "target": write_llama(root / "target", shape),
        "draft": write_llama(root / "draft", TinyLlama(seed=5)),
        "eagle": write_eagle(root / "eagle", shape),
        "eagle3": write_eagle3(root / "eagle3", shape),
    }
    return {name: str(folder) for name, folder in folders.items()}


def arguments(models: dict[str, str], **changes: Any) -> ServerArgs:
    defaults: dict[str, Any] = dict(
        model_path=models["target"],
        speculative_algorithm="dustin",
        speculative_draft_model_path=models["draft"],
        device="cpu",
        dtype="float32",
    )
    return ServerArgs(**(defaults | changes))


REFUSED = [
    ({"pp_size": 2}, "pipeline parallelism.*use --tp-size"),
    ({"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}, "DP attention"),
    ({"dcp_size": 2}, "context parallelism"),
    ({"attn_cp_size": 2, "tp_size": 2}, "context parallelism"),
    ({"disaggregation_mode": "prefill"}, "prefill-decode disaggregation"),
    ({"enable_two_batch_overlap": True}, "two-batch"),
    ({"enable_single_batch_overlap": True}, "single-batch"),
    ({"enable_pdmux": True}, "PD multiplexing"),
    ({"smg_grpc_mode": True}, "legacy gRPC server.*use HTTP"),
    ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num above 1.*use 1"),
    ({"enable_hierarchical_cache": True}, "hierarchical or external"),
    ({"enable_lmcache": True}, "hierarchical or external"),
    ({"enable_flexkv": True}, "hierarchical or external"),
    ({"enable_hisparse": True}, "HiSparse"),
    ({"enable_unified_memory": True}, "unified memory"),
    ({"enable_streaming_session": True}, "streaming sessions"),
    ({"enable_session_radix_cache": True}, "streaming sessions"),
    ({"radix_cache_backend": "other"}, "remove --radix-cache-backend other"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3.*use auto"),
    ({"speculative_adaptive": True}, "adaptive speculation"),
    ({"speculative_use_rejection_sampling": True}, "rejection-sampling"),
    ({"speculative_accept_threshold_acc": 0.5}, "the CPU would ignore them"),
    ({"enable_multi_layer_eagle": True}, "multi-layer EAGLE"),
    ({"speculative_attention_mode": "decode"}, "attention-mode decode.*use prefill"),
    ({"speculative_draft_window_size": 128}, "draft-window-size"),
    ({"decoupled_spec_role": "verifier"}, "decoupled"),
    ({"enable_lora": True}, "LoRA"),
    ({"lora_paths": ["adapter"]}, "LoRA"),
    ({"dllm_algorithm": "LowConfidence"}, "diffusion"),
    ({"attention_backend": "triton"}, "remove --attention-backend triton"),
    ({"prefill_attention_backend": "triton"}, "remove --prefill-attention-backend triton"),
    ({"decode_attention_backend": "triton"}, "remove --decode-attention-backend triton"),
    ({"speculative_draft_attention_backend": "triton"}, "remove --speculative-draft-attention-backend"),
    ({"cuda_graph_backend_prefill": "full"}, "full CUDA graphs for prefill"),
    ({"speculative_draft_model_path": None}, "needs --speculative-draft-model-path"),
    (
        {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2},
        "--speculative-num-steps is 1; dustin needs at least 2",
    ),
    ({"speculative_num_steps": 3}, "give all three"),
]


@pytest.mark.parametrize(
    "changes, message", REFUSED, ids=lambda value: next(iter(value), "") if isinstance(value, dict) else ""
)
def test_refused_with_what_to_do_instead(models: dict[str, str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(models, **changes)


@pytest.mark.parametrize(
    "variable, message",
    [
        ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "PLAN_STREAM is not supported.*unset it"),
        ("SGLANG_RUST_SERVER", "RUST_SERVER is not supported.*unset it"),
        ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
        ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "unset SGLANG_ENABLE_UNIFIED_RADIX_TREE"),
    ],
)
def test_refused_environment(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=message):
        arguments(models)


def test_refused_where_sglang_itself_refuses_earlier_on_the_cpu() -> None:
    """fp4 KV and deterministic inference get no further than SGLang without a GPU, so the rules are asked directly."""
    fp4 = SimpleNamespace(
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        enable_hisparse=False,
        enable_unified_memory=False,
        enable_streaming_session=False,
        enable_session_radix_cache=False,
        radix_cache_backend=None,
        kv_cache_dtype="fp4_mx_block16",
    )
    assert "fp4_mx_block16" in next(refusals._memory(fp4))
    deterministic = SimpleNamespace(
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        device="cuda",
        enable_multi_layer_eagle=False,
        speculative_attention_mode="prefill",
        speculative_draft_window_size=None,
        decoupled_spec_role="null",
        enable_lora=False,
        lora_paths=None,
        enable_deterministic_inference=True,
        dllm_algorithm=None,
    )
    assert "deterministic" in next(refusals._speculation(deterministic))


def edited(source: str, folder: Path, **changes: Any) -> str:
    """A copy of model folder `source` whose config differs."""
    folder.mkdir()
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "role, changes, message",
    [
        ("draft", {"vocab_size": 999}, "vocabulary of 999 tokens is not the target's"),
        ("draft", {"max_position_embeddings": 64}, "context of 64 tokens is shorter.*--context-length 64"),
        ("eagle3", {"max_position_embeddings": 64}, "context of 64 tokens is shorter.*--context-length 64"),
        ("draft", {"architectures": ["LlamaForCausalLMNextN"]}, "multi-token-prediction drafts are not supported"),
        ("eagle", {"hidden_size": 128}, "hidden states of 128, but the target's have 64.*trained for this target"),
        ("eagle3", {"target_hidden_size": 96}, "hidden states of 96, but the target's have 64"),
        ("eagle", {"vocab_size": 999}, "vocabulary of 999 tokens is not the target's"),
        ("target", {"architectures": ["MistralForCausalLM"], "sliding_window": 32}, "target uses sliding-window"),
    ],
)
def test_refused_models(
    models: dict[str, str], tmp_path: Path, role: str, changes: dict[str, Any], message: str
) -> None:
    """Drafts and targets that cannot work together.

    SGLang #6783: a draft slower than none beyond its own context; SGLang #3574, vLLM #21986, #57941, PR #24662 and
    PR #22935: a request longer than that crashes; SGLang #27789: a sliding-window pool that leaks (no such model runs).
    """
    argument = "model_path" if role == "target" else "speculative_draft_model_path"
    with pytest.raises(ValueError, match=message):
        arguments(models, **{argument: edited(models[role], tmp_path / role, **changes)})


def test_a_pickled_draft_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    pickled = Path(edited(models["draft"], tmp_path / "draft"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is pickled.*convert it to safetensors"):
        arguments(models, speculative_draft_model_path=str(pickled))
    with pytest.raises(ValueError, match="load format pt is not supported for the draft"):
        arguments(models, speculative_draft_load_format="pt")


def test_a_short_draft_is_allowed_when_the_user_says_so(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = edited(models["draft"], tmp_path / "draft", max_position_embeddings=64)
    assert arguments(models, speculative_draft_model_path=short, context_length=64).context_length == 64
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    arguments(models, speculative_draft_model_path=short)


def test_more_groups_than_the_target_has_layers_are_refused(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUSTIN_LAYER_GROUPS", "4")
    arguments(models)
    monkeypatch.setenv("DUSTIN_LAYER_GROUPS", "5")
    with pytest.raises(ValueError, match="--dustin-layer-groups .* is 5, but the target has 4 layers.*from 1 to 4"):
        arguments(models)


def fake_config(**changes: Any) -> SimpleNamespace:
    defaults = dict(
        attention_arch=SimpleNamespace(name="MHA"),
        is_hybrid_swa=False,
        sliding_window_size=None,
        is_encoder_decoder=False,
        context_len=100,
        vocab_size=10,
        hidden_size=8,
        hf_config=SimpleNamespace(),
        num_attention_layers=4,
    )
    return SimpleNamespace(**(defaults | changes))


@pytest.mark.parametrize(
    "changes, recurrent, message",
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, False, "MLA attention"),
        ({"is_encoder_decoder": True}, False, "cross-attention"),
        ({}, True, "recurrent or linear-attention"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_refused_architectures(
    monkeypatch: pytest.MonkeyPatch, role: str, changes: dict[str, Any], recurrent: bool, message: str
) -> None:
    odd, plain = fake_config(**changes), fake_config()
    monkeypatch.setattr(refusals, "draft_config", lambda args: odd if role == "draft" else plain)
    monkeypatch.setattr(refusals.compat, "has_recurrent_layers", lambda config: recurrent and config is odd)
    args = SimpleNamespace(get_model_config=lambda: odd if role == "target" else plain, context_length=None)
    reasons = list(refusals._models(args, DraftKind.EAGLE))
    assert len(reasons) == 1 and f"the {role} " in reasons[0] and message in reasons[0]


def test_the_bare_command_chooses_its_backends_and_the_draft_shape(models: dict[str, str]) -> None:
    args = arguments(models)
    assert (args.attention_backend, args.speculative_draft_attention_backend) == ("torch_native", "torch_native")
    assert args.radix_cache_backend == "dustin" and args.disable_overlap_schedule
    shape = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    assert shape == (3, 1, 4) and args.max_running_requests == 48


@pytest.mark.parametrize("kind, shape", [("eagle", (5, 4, 8)), ("eagle3", (5, 4, 8)), ("draft", (3, 1, 4))])
def test_the_kind_of_draft_is_detected_at_every_launch(
    models: dict[str, str], kind: str, shape: tuple[int, ...]
) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string("dustin")
    args = arguments(models, speculative_draft_model_path=models[kind])
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens) == shape
    assert algorithm.kind is (DraftKind.STANDALONE if kind == "draft" else DraftKind(kind))


def test_mixed_chunk_is_switched_off_and_a_chain_verifies_steps_plus_one(models: dict[str, str]) -> None:
    chain = dict(speculative_num_steps=4, speculative_eagle_topk=1, speculative_num_draft_tokens=9)
    args = arguments(models, enable_mixed_chunk=True, **chain)
    assert not args.enable_mixed_chunk and args.speculative_num_draft_tokens == 5
