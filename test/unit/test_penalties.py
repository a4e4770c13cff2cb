"""Penalties over the tokens of whole accepted runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import SamplingParams

from dustin_sglang.algorithm import NAME
from dustin_sglang.penalties import cumulate_runs

VOCAB = 8
EOS = 2


def request(**sampling: Any) -> SimpleNamespace:
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
    return SimpleNamespace(
        sampling_params=SamplingParams(**sampling), output_ids=[], retraction_count=0, tokenizer=tokenizer
    )


class Batch:
    """What a penalizer sees of SGLang's `ScheduleBatch`."""

    def __init__(self, *reqs: SimpleNamespace, name: str = NAME) -> None:
        self.reqs, self.device, self.spec_algorithm = list(reqs), "cpu", SimpleNamespace(name=name)
        self.prefilled()

    def prefilled(self) -> None:
        kinds = {
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
        }
        orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, self, kinds)
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)

    def round(self, *runs: list[int]) -> torch.Tensor:
        """Confirm a run for each request, begin the next round and penalise logits of 1."""
        for req, run in zip(self.reqs, runs, strict=True):
            req.output_ids = [*req.output_ids, *run]
        cumulate_runs(self.not_ours, self)
        logits = torch.ones(len(self.reqs), VOCAB)
        self.sampling_info.penalizer_orchestrator.apply(logits)
        return logits

    def not_ours(self, batch: Any) -> None:
        raise AssertionError("SGLang's own count was asked")


def test_every_token_of_a_run_counts_as_often_as_it_came() -> None:
    batch = Batch(request(frequency_penalty=0.5), request())
    logits = batch.round([3, 3, 4], [5])
    assert logits[0].tolist() == [1, 1, 1, 0, 0.5, 1, 1, 1] and (logits[1] == 1).all()
    assert batch.round([4], [6, 6])[0].tolist() == [1, 1, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("penalty, expected", [({"presence_penalty": 0.5}, 0.5), ({"repetition_penalty": 2.0}, 0.5)])
def test_presence_and_repetition_reach_the_tokens_inside_a_run(penalty: dict[str, float], expected: float) -> None:
    logits = Batch(request(**penalty)).round([3, 4, 3])
    assert logits[0].tolist() == [1, 1, 1, expected, expected, 1, 1, 1]


def test_min_new_tokens_counts_tokens_and_not_rounds() -> None:
    batch = Batch(request(min_new_tokens=4))
    assert batch.round([3, 3, 3])[0, EOS] == -torch.inf
    assert batch.round([3])[0, EOS] == 1


def test_a_retracted_request_is_counted_anew() -> None:
    req = request(frequency_penalty=0.5)
    batch = Batch(req)
    batch.round([3, 4])
    req.retraction_count += 1
    batch.prefilled()  # SGLang makes new penalizers when it prefills the request again
    assert batch.round([5])[0].tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_other_algorithms_keep_sglangs_count() -> None:
    with pytest.raises(AssertionError, match="SGLang's own"):
        Batch(request(frequency_penalty=0.5), name="EAGLE").round([3])
