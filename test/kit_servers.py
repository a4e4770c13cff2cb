"""SGLang's own test kits, and its server fixture for them, against dustin.

The kits are mixins of test methods that talk to a running server over HTTP; ``SpecEagleServerBase`` starts the server
from class attributes. What a kit asserts stays as it is; thresholds and sizes that belong to a model are attributes.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch

if torch.cuda.is_available():  # CUDA reads the variable once, torch counts devices once: both before it names a port
    torch.cuda.init()
    torch.cuda.device_count()
# SGLang's tests derive a port from the first character of the device's number, which must be there; and importing them
# sets variables that would reach the servers of all other tests. DUSTIN_TEST_PORTS: a digit for each run side by side.
with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=os.environ.get("DUSTIN_TEST_PORTS", "0")):
    from sglang.test.kits import spec_server_kits
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
    from sglang.test.kits.matched_stop_kit import MatchedStopMixin
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

__all__ = [
    "AbortAllMixin",
    "BasicAPIContractMixin",
    "EBNFConstrainedMixin",
    "MatchedStopMixin",
    "PauseResumeInPlaceMixin",
    "RegexConstrainedMixin",
    "SpecEagleServerBase",
    "can_write_a_space",
    "put_sglang_on_path",
    "spec_server_kits",
]

# Kits of the wheel that no test here runs, and why. A file of kits that is neither here nor above fails a test.
NOT_RUN = {
    "SpecAccuracyKit": "needs the GSM8K data set, and a model that can solve it",
    "SpecPerfKit": "needs the GSM8K data set",
    "attention_unittest": "unit tests of SGLang's attention backends, not of a server",
    "basic_decode_correctness_kit": "asks for facts and sums that a model of 135M parameters does not know",
    "basic_scheduler_stress_kit": "asks for facts that a model of 135M parameters does not know",
    "cache_hit_kit": "no test methods; needs the ShareGPT data set (test/engine/test_long_chat.py asks the same)",
    "eval_accuracy_kit": "needs GSM8K, MMLU, GPQA, AIME, HumanEval or MGSM",
    "fwd_occupancy_kit": "measures SGLang's own GPU occupancy timer against a threshold of its CI machines",
    "hellaswag_kit": "needs the HellaSwag data set",
    "json_constrained_kit": "sends a stop token of Llama 3, which a smaller vocabulary does not have",
    "kl_divergence_kit": "needs the LongBench v2 data set",
    "lm_eval_kit": "needs lm-eval and its data sets",
    "mmmu_vlm_kit": "images, which dustin refuses",
    "prefix_cache_branching_kit": "for caches of recurrent states, which dustin refuses",
    "reasoning_kit": "needs a reasoning model",
    "spec_decoding_kit": "a speed threshold of SGLang's CI machines; benchmark/ measures speed",
    "streaming_session_kit": "streaming sessions, which dustin refuses",
    "unified_radix_cache_kit": "the unified radix tree, which dustin refuses",
}


def put_sglang_on_path(folder: Path, command: str, *arguments: str) -> None:
    """Let the fixture's ``sglang serve`` run `command`, with `arguments` after the fixture's own."""
    script = folder / "sglang"
    script.write_text(f'#!/bin/sh\nexec {command} "$@" {" ".join(arguments)}\n')
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def can_write_a_space(model: str | Path) -> bool:
    """Whether grammars of this model's tokenizer can write a space.

    xgrammar tells from a tokenizer's decoder how the vocabulary spells bytes. It takes what transformers reads from a
    GGUF file for byte fallback, and then no token has a space: answers end before it, aborted.
    """
    import xgrammar
    from transformers import AutoTokenizer

    return b" " in xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(model)).decoded_vocab
