"""An answer ends where it would end token by token, also when a run crosses max_new_tokens."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dustin_sglang import finish

STOP, EOS = 7, 2
TOKENIZER = SimpleNamespace(
    eos_token_id=EOS,
    additional_stop_token_ids=None,
    encode=lambda text, **options: [0] * len(text.split()),
    decode=lambda ids, **options: "".join(f" w{token}" for token in ids),
)


def request(limit: int, **sampling: Any) -> Req:
    params = SamplingParams(max_new_tokens=limit, **sampling)
    params.normalize(TOKENIZER)
    req = Req("r", "", array("q", [5, 6]), params, vocab_size=100)
    req.tokenizer = TOKENIZER
    return req


def ended(req: Req, runs: list[list[int]]) -> tuple[list[int], str]:
    for run in runs:
        req.output_ids.extend(run)
        finish.stop_before_length(Req.update_finish_state, req, len(run))
        if req.finished():
            break
    length = len(req.output_ids) if req.finished_len is None else req.finished_len
    return list(req.output_ids[:length]), req.finished_reason.to_json()["type"]


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "_is_ours", lambda: True)


@pytest.mark.parametrize(
    "sampling", [{"stop_token_ids": [STOP]}, {"stop": ["w7"]}, {"stop_regex": ["w7"]}], ids=lambda s: next(iter(s))
)
@pytest.mark.parametrize("limit", range(1, 8))
@pytest.mark.parametrize("at", range(6))
def test_runs_end_as_tokens_one_by_one(sampling: dict[str, Any], limit: int, at: int) -> None:
    tokens = [STOP if i == at else 10 + i for i in range(8)]
    runs = [tokens[:1], tokens[1:3], tokens[3:8]]
    assert ended(request(limit, **sampling), runs) == ended(request(limit, **sampling), [[token] for token in tokens])


def test_eos_in_the_run_that_crosses_the_limit() -> None:
    assert ended(request(3), [[10], [EOS, 11, 12]]) == ([10, EOS], "stop")
    assert ended(request(3, ignore_eos=True), [[10], [EOS, 11, 12]]) == ([10, EOS, 11], "length")


def test_other_algorithms_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "_is_ours", lambda: False)
    assert ended(request(3), [[10], [EOS, 11, 12]]) == ([10, EOS, 11], "length")
