"""Ten minutes of mixed traffic; slow, so `./run test --slow`. benchmark/soak.py runs the same on a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import soak
from launch import TARGET, tokens
from results import Results, describe_run
from soak_material import Material
from soak_traffic import Traffic

from dustin_sglang.demo.server import Server

SECONDS = int(os.environ.get("DUSTIN_SOAK_SECONDS", "600"))
JSON = os.environ.get("DUSTIN_SOAK_JSON")
LAUNCHES = {
    "draft page 1": ["--page-size", "1"],
    "draft page 64, rectified and monitored": [
        "--page-size",
        "64",
        "--dustin-rectify-interval",
        "32",
        "--dustin-monitor-interval",
        "7",
    ],
    "eagle page 16": ["--page-size", "16"],
}
MATERIAL = Material(
    tokens=tokens(1000, seed=5),
    ends=frozenset({2}),
    forced=77,
    grammars=[
        ({"regex": "(w1[0-9]){3}(w20|w22)"}, "(w1[0-9]){3}(w20|w22)"),
        ({"ebnf": 'root ::= "w10" "w25"'}, "w10w25"),
    ],
    options=[
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 1, "top_k": 5},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.2},
        {"stop": ["w77"]},
        {"ignore_eos": True},
    ],
)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("name, share", list(zip(LAUNCHES, (0.4, 0.3, 0.3))), ids=list(LAUNCHES))
def test_ten_minutes_without_a_leak_a_wrong_answer_or_a_slowdown(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    """SGLang #13741 and PR #13826, sglang-jax #1147, SGLang #27789 and the comment on PR #10090.

    Slots lost a request at larger pages, under load or after a thousand requests; and merging batches that died at
    fifty clients.
    """
    for variable, value in soak.STRICT.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # barriers cost tiny models most
    models = ["--model", tiny["target"], "--draft", tiny[name.split()[0]]]
    # A pool of about four requests and a chunk of a prompt at a time.
    sizes = ["--budget", "512", "--context", "1000", "--chunk", "256", "--max-running", "4", "--mem-fraction", "0.3"]
    args, extra = soak.parse([*models, *sizes, "--clients", "4", "--burst", "10", *LAUNCHES[name]])
    with Server(soak.launch(args, extra), "soak") as server:
        traffic = Traffic(server.url, MATERIAL, soak.make_load(args))
        traffic.prepare(time.monotonic() + SECONDS)
        row = dict(pair=f"tiny, {name}") | soak.soak(server, traffic, time.monotonic() + SECONDS * share)
    print(f"\n{row}")
    if JSON:
        given = {option: value for option, value in vars(args).items() if option not in ("json", "seconds")}
        settings = given | dict(server=extra, target=str(TARGET), model="tiny random", draft="tiny random")
        Results(Path(JSON), ("pair",), settings, describe_run()).add(row)
    assert not soak.faults(row), row
    assert row["exact"] and row["evicted_tokens"] and row["retractions"], row
    assert row["host_memory_growth_mib"] < 200
