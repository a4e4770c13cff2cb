"""A model in transformers whose attention shows its post-RoPE queries, keys and values.

One attention function, registered with transformers under a name of its own, serves every architecture whose attention
goes through that registry (Llama, Qwen2, Qwen3, Mistral and others). It attends causally and knows no mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_sglang.profile import ModelShape


class CalibrationError(ValueError):
    """Calibration cannot go on; the message says what to change."""


@dataclass(frozen=True)
class Layer:
    """What one layer's attention sees of one sequence.

    Attributes
    ----------
    index
        The layer.
    q
        Post-RoPE queries ``[heads, tokens, head_dim]``.
    k, v
        Post-RoPE keys, and values ``[kv_heads, tokens, head_dim]``.
    scale
        Factor of q.K.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float


Attend = Callable[[Layer], torch.Tensor]  # returns [heads, tokens, head_dim]

_NAME = "dustin_trace"
_attend: ContextVar[Attend] = ContextVar("attend")


class TracedModel:
    """A causal language model whose attention is observed or replaced.

    Parameters
    ----------
    path
        Hugging Face folder.
    device, dtype
        Where and in what type it runs.

    Raises
    ------
    CalibrationError
        The folder holds no model that transformers can run, or one whose attention is not causal attention of
        grouped queries over the whole context.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if not (path / "config.json").is_file():
            raise CalibrationError(f"{path} is not a model folder: it has no config.json (hubs are not looked up)")
        for name in json.loads((path / "config.json").read_text()).get("architectures") or []:
            if "Eagle" in name:  # transformers would make up the weights that such a head lacks
                raise CalibrationError(f"{path} is a {name}; give a whole model")
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=_NAME)
        except (ValueError, OSError, KeyError) as error:
            raise CalibrationError(f"{path}: transformers cannot run this model: {error}") from error
        self._model.to(torch.device(device)).eval()  # type: ignore[arg-type]
        config = self._model.config.get_text_config()
        self.path, self.device, self.vocab_size = path, device, int(config.vocab_size)
        self.max_tokens = int(config.max_position_embeddings)
        heads = int(config.num_attention_heads)
        self.shape = ModelShape(
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )

    def read(self, ids: list[int], visit: Callable[[Layer], None], rows: list[int]) -> torch.Tensor:
        """Read a sequence densely and show every layer to `visit`.

        Returns
        -------
        torch.Tensor
            float32 ``[len(rows), vocab]``, logits of the positions `rows`.
        """

        def attend(layer: Layer) -> torch.Tensor:
            visit(layer)
            return _causal(layer)

        return self._forward(ids, list(range(len(ids))), attend, rows)

    def verify(self, ids: list[int], positions: list[int], attend: Attend) -> torch.Tensor:
        """Run tokens at these positions with an attention of the caller's.

        Returns
        -------
        torch.Tensor
            float32 ``[len(ids), vocab]``.
        """
        return self._forward(ids, positions, attend, list(range(len(ids))))

    @torch.no_grad()
    def _forward(self, ids: list[int], positions: list[int], attend: Attend, rows: list[int]) -> torch.Tensor:
        with _attending(attend):
            logits = self._model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(rows, device=self.device),
            ).logits
        return logits[0].float()


@contextmanager
def _attending(attend: Attend) -> Iterator[None]:
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention function as transformers calls it: ``[1, heads, tokens, head_dim]`` in, tokens before heads out."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise CalibrationError(f"layer {module.layer_idx} uses {name}, which sparse verification does not support")
    layer = Layer(module.layer_idx, query[0], key[0], value[0], float(kwargs["scaling"]))
    return _attend.get()(layer).transpose(0, 1).unsqueeze(0).contiguous(), None


def _causal(layer: Layer) -> torch.Tensor:
    q, k, v = (x.unsqueeze(0) for x in (layer.q, layer.k, layer.v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
    )[0]


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float, own_rows: bool = False) -> torch.Tensor:
    """Softmax attention of query rows over keys.

    Parameters
    ----------
    q
        ``[heads, rows, head_dim]``.
    k
        ``[kv_heads, keys, head_dim]``.
    own_rows
        The last keys are the rows' own: row r sees them up to itself.

    Returns
    -------
    torch.Tensor
        float32 ``[heads, rows, keys]``.
    """
    group = q.shape[0] // k.shape[0]
    logits = q.float().unflatten(0, (-1, group)).flatten(1, 2) @ k.float().transpose(1, 2) * scale
    logits = logits.unflatten(1, (group, -1)).flatten(0, 1)
    if own_rows:
        rows = q.shape[1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        logits[:, :, -rows:] = logits[:, :, -rows:].masked_fill(later, float("-inf"))
    return logits.softmax(-1)
