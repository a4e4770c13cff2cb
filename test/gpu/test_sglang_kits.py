"""SGLang's own kits on the GPU, against a real pair: within the budget, where kits compare, and far beyond it.

``DUSTIN_TEST_ALGORITHM=STANDALONE`` runs them against SGLang's own speculation: what fails there too is not ours.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest

kit_servers = pytest.importorskip("kit_servers", reason="needs SGLang with CUDA", exc_type=ImportError)
from engines import DRAFT, MODEL  # noqa: E402
from sglang.srt.utils import kill_process_tree  # noqa: E402
from sglang.test.test_utils import popen_launch_server  # noqa: E402

kits = kit_servers.spec_server_kits
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

# Acceptance of a batch of other shapes turns on rounding; SGLang's own thresholds leave at least as much.
SHARE_OF_DENSE = 0.9
ALGORITHM = os.environ.get("DUSTIN_TEST_ALGORITHM", "DUSTIN")


class OnPath:
    """Lets the fixtures find ``sglang`` before the first server of a test class starts: first among the bases."""

    @classmethod
    def setUpClass(cls) -> None:
        made = "grammars cannot write a space with this tokenizer; make the model with python -m dustin_sglang.models"
        assert kit_servers.can_write_a_space(cls.model), made
        cls.folder = tempfile.TemporaryDirectory()
        # Without these servers take minutes to start, and half of a GPU that other test files use too.
        options = ("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "8", "--max-total-tokens", "65536")
        launcher = f"{sys.executable} -c 'import sglang.cli.main as cli; cli.main()'"  # `-m` would only import it
        kit_servers.put_sglang_on_path(Path(cls.folder.name), launcher, *options)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        cls.folder.cleanup()


class RealPair(kit_servers.SpecEagleServerBase):
    """The fixture's launch, by attributes, with the pair of the other GPU tests."""

    model, draft_model = MODEL, DRAFT
    spec_algo = ALGORITHM
    spec_steps, spec_topk, spec_tokens = 3, 1, 4
    trust_remote_code = False
    mem_fraction_static = 0.9
    budget = 8192

    @classmethod
    def _launch_args(cls) -> list[str]:
        budget = ["--dustin-budget", str(cls.budget)] if cls.spec_algo == "DUSTIN" else []
        return [*super()._launch_args(), *budget]


open_ended = unittest.skip("open-ended: [a-z]+ may not end before the answer is cut, without speculation too")


class Measured:
    """Stands in for a test case: runs a kit's requests and keeps what the kit would have compared."""

    acc_length_thres = batch_accept_len_thres = 0.0

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.value = 0.0

    def assertGreater(self, value: float, floor: float) -> None:
        self.value = value

    def assertIn(self, *args: Any) -> None:
        pass


def passes(test: str, kit: type, **attributes: Any) -> bool:
    """Whether the server that is up passes one test of a kit."""
    case = type("Case", (kit, unittest.TestCase), attributes)(test)
    return case.run(unittest.TestResult()).wasSuccessful()


class DenseSpeculation(kits.SpecParityKit):
    """Thresholds and prompts from SGLang's own dense speculation with the same pair.

    A threshold of acceptance becomes a share of what dense speculation reaches. In bfloat16 a verification rounds
    otherwise than a decode step, so that dense speculation too may leave the reference at a tie: such a prompt says
    nothing and is left out, and where that is every prompt, the comparison is skipped. So is the open-ended JSON where
    dense speculation does not end it either.
    """

    @classmethod
    def setUpClass(cls) -> None:
        url = kits.DEFAULT_URL_FOR_TEST
        algorithm, cls.spec_algo = cls.spec_algo, "STANDALONE"
        process = popen_launch_server(cls.model, url, timeout=300, other_args=cls._launch_args())
        cls.spec_algo = algorithm
        try:
            measured = Measured(url)
            kits.SpecCorrectnessKit.test_acc_length(measured)
            cls.acc_length_thres = SHARE_OF_DENSE * measured.value
            kits.SpecCorrectnessKit.test_batch_generation(measured)
            cls.batch_accept_len_thres = SHARE_OF_DENSE * measured.value
            dense = {prompt: kits._greedy(url, prompt) for prompt in cls.parity_prompts}
            cls.ends_json = passes("test_constrained_decoding", kits.SpecFeatureKit, base_url=url, model=cls.model)
        finally:
            kill_process_tree(process.pid, wait_timeout=60)
        super().setUpClass()
        cls.parity_prompts = [p for p in cls.parity_prompts if dense[p] == cls.parity_ref_outputs[p]]

    def test_parity_vs_reference(self) -> None:
        if not self.parity_prompts:
            self.skipTest("dense speculation agrees with the reference nowhere")
        super().test_parity_vs_reference()

    def test_constrained_decoding(self) -> None:
        if not self.ends_json:
            self.skipTest("this model repeats itself to the end of its context, under dense speculation too")
        super().test_constrained_decoding()


class TestWithinTheBudget(
    OnPath,
    DenseSpeculation,
    kits.SpecCorrectnessKit,
    kits.SpecLogprobKit,
    kits.SpecPenaltyKit,
    kits.SpecFeatureKit,
    kits.SpecGrammarKit,
    RealPair,
):
    """What compares with a prefill, or with a server without speculation, needs a budget of the context.

    And finer rounding than the fixture's bfloat16, in which dense speculation leaves the reference at every prompt: a
    logit of this model is up to 38, where bfloat16's last bit is 0.25. Reading a text in other chunks moves a lead by
    up to 0.9 nats, in float16 by 0.05 (README.md, soak). No activation passes 24,100, and float16 holds 65,504.
    """

    dtype = "float16"


class TestBeyondTheBudget(
    OnPath,
    kits.SpecPenaltyKit,
    kits.SpecFeatureKit,
    kit_servers.AbortAllMixin,
    kit_servers.BasicAPIContractMixin,
    kit_servers.EBNFConstrainedMixin,
    kit_servers.MatchedStopMixin,
    kit_servers.RegexConstrainedMixin,
    RealPair,
):
    """Long prompts and answers, verified sparsely."""

    budget = 128
    abort_all_max_new_tokens = 8000  # with the prompt, within the model's context

    test_finish_stop_eos = unittest.skip("its prompt and end are in Llama 3's chat format")(
        kit_servers.MatchedStopMixin.test_finish_stop_eos
    )
    test_regex_generate_custom_log_format = open_ended(
        kit_servers.RegexConstrainedMixin.test_regex_generate_custom_log_format
    )
    test_ebnf_generate_custom_log_format = open_ended(
        kit_servers.EBNFConstrainedMixin.test_ebnf_generate_custom_log_format
    )
    test_ebnf_generate_complex_json = unittest.skip("its grammar allows other keys than it accepts")(
        kit_servers.EBNFConstrainedMixin.test_ebnf_generate_complex_json
    )


class TestPauseAndResume(OnPath, kit_servers.PauseResumeInPlaceMixin, RealPair):
    """Answers of full length: SmolLM2 takes the kit's bare prompts for ended turns and gives 19 of 32 empty answers."""

    budget = 128
    extra_args = ("--preferred-sampling-params", '{"ignore_eos": true}')
