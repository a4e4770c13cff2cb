"""A real SGLang server in a process group of its own, on the CPU unless DUSTIN_TEST_DEVICE says otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 240
ON_CPU = os.environ.get("DUSTIN_TEST_DEVICE", "cpu") == "cpu"
# Of log-probabilities and hidden states: float32 on the CPU, bf16 on a GPU.
TOLERANCE = 1e-3 if ON_CPU else 0.1
# Small pools, so that a test machine holds several servers.
CPU_OPTIONS = ("--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.3")
# Captured batch sizes with gaps, so that batches run padded; prefill graphs take a minute to capture. The fraction is
# of a GPU that other test files may use too; --max-total-tokens is what bounds a server's memory.
GPU_OPTIONS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.9", "--attention-backend", "flashinfer")
GPU_OPTIONS += ("--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "1", "4", "8", "--max-running-requests", "16")


def few_models() -> dict[str, str]:
    """SGLang's variable by which a process imports Llama's family only: all models take a seventh of its start."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    models = (Path(found.origin).parent / "srt" / "models").glob("*.py")
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(m.stem for m in models if not m.stem.startswith("llama")))}


@dataclass(frozen=True)
class Server:
    """Address, log and launcher of a running server."""

    url: str
    log: Path
    pid: int

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics``, summed over their labels except `source`."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                source = sample.labels.get("source")
                name = f"{sample.name}[{source}]" if source else sample.name
                samples[name] = samples.get(name, 0.0) + sample.value
        return samples

    def generate(self, prompt: str, new_tokens: int, **sampling: object) -> dict:
        """Answer of SGLang's own ``/generate``, greedy unless `sampling` says otherwise."""
        return self.ask(new_tokens, sampling, text=prompt)

    def ask(self, new_tokens: int, sampling: dict[str, object], **request: object) -> dict:
        """As `generate`, with the fields of the request."""
        response = self.post(new_tokens, sampling, **request)
        response.raise_for_status()
        return response.json()

    def post(self, new_tokens: int, sampling: dict[str, object], **request: object) -> requests.Response:
        """As `ask`, whatever the status."""
        body = request | {"sampling_params": {"temperature": 0, "max_new_tokens": new_tokens} | sampling}
        return requests.post(f"{self.url}/generate", json=body, timeout=120)

    def compile_samplers(self) -> None:
        """Sample once with every option: on a GPU the first request of a kind may wait minutes for a compiler."""
        sampling = {"temperature": 1, "top_k": 3, "top_p": 0.9, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": ["w10 w11", "w10 w11"], "sampling_params": [sampling, {"temperature": 1}]}
        requests.post(f"{self.url}/generate", json=body, timeout=500).raise_for_status()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*arguments: str, module: str = "sglang.launch_server", port: int) -> list[str]:
    """The command line of a server."""
    # `module` may be one that `python -m` does not run; dustin_sglang.cpu does.
    launcher = ["dustin_sglang.cpu", *module.split()] if ON_CPU else ["sglang.launch_server"]
    common = ["--host", "127.0.0.1", "--port", str(port)]
    common.append("--sleep-on-idle")  # SGLang polls otherwise, and an idle server takes a core from its tests
    options = CPU_OPTIONS if ON_CPU else GPU_OPTIONS
    # The first options lose against the caller's.
    return [sys.executable, "-m", *launcher, *options, *arguments, *common]


def small_budget(models: dict[str, str]) -> list[str]:
    """Dustin with a whole-model draft and a budget that most prompts of these tests exceed."""
    paths = ["--model-path", models["target"], "--speculative-draft-model-path", models["draft"]]
    options = ["--speculative-algorithm", "dustin", "--dustin-budget", "64", "--dustin-window", "16"]
    return [*paths, *options, "--max-total-tokens", "8192"]


@contextlib.contextmanager
def serve(*arguments: str, module: str = "sglang.launch_server", env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server, wait until it answers, kill its process tree at the end."""
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="dustin-server-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(*arguments, module=module, port=port),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | few_models() | (env or {}),  # barriers cost tiny models most
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield Server(url, log, process.pid)
    finally:
        kill_tree(process.pid)


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    """Return when the server answers; fail with the end of its log when it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health_generate", timeout=30).ok:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start (exit code {process.poll()}):\n{log.read_text()[-4000:]}")


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        parent.wait(30)
