"""`sglang.bench_serving` runs against a dustin server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from serving import Server


def test_bench_serving_completes_every_request(server: Server, tiny: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    arguments = ["--backend", "sglang", "--base-url", server.url, "--model", tiny["target"]]
    arguments += ["--tokenizer", tiny["target"], "--dataset-name", "random-ids", "--num-prompts", "6"]
    arguments += ["--random-input-len", "150", "--random-output-len", "12", "--random-range-ratio", "1.0"]
    arguments += ["--output-file", str(output)]
    run = subprocess.run(
        [sys.executable, "-m", "dustin_sglang.cpu", "sglang.bench_serving", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    result = json.loads(output.read_text().splitlines()[-1])
    assert result["completed"] == 6 and result["total_output_tokens"] == 72
    assert result["accept_length"] >= 1
