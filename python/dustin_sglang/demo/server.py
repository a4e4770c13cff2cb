"""Start a real SGLang server in a process of its own, wait until it answers, and take it down again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from dustin_sglang.demo.progress import Progress

# Lines of the server's log, in order, and what begins with each.
STAGES = (
    ("server_args=", "loading SGLang"),
    ("Load weight begin", "loading the model"),
    ("Load weight end", "loading the draft"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Tree cache initialized", "starting the HTTP server"),
    ("Uvicorn running", "warming up"),
)
REMEDIES = (
    (
        "out of memory|Not enough memory",
        "free memory on this machine, or choose a smaller model with --model and --draft",
    ),
    ("No module named 'sglang'", "run ./run demo, which installs SGLang, instead of this module"),
    (
        "unrecognized arguments: --dustin|Unknown speculative algorithm",
        "install the project: pip install --no-deps -e .",
    ),
)
TAIL_LINES = 25


class ServerError(RuntimeError):
    """The server did not start; the message holds the end of its log and what to do."""


def claim_port(port: int) -> int:
    """Return `port`, or a free one for 0; raise ServerError where another program listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that ended just now is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(f"port {port}: {error.strerror}\n  remedy: choose another one with --port") from error
        found: int = probe.getsockname()[1]
        return found


class Server:
    """A server process, as a context manager: the block runs while it answers, and it never outlives the block.

    Parameters
    ----------
    command : list of str
        What to run, without the address.
    title : str
        What to call it on the screen.
    port : int
        Port to listen on; 0 takes a free one.
    timeout : float, default 600
        Seconds after which a server that does not answer counts as failed.

    Attributes
    ----------
    url : str
        Its address, without a final slash.
    log : Path
        Its output.
    """

    def __init__(self, command: list[str], title: str, port: int = 0, timeout: float = 600.0) -> None:
        port = claim_port(port)
        self.url = f"http://127.0.0.1:{port}"
        handle, name = tempfile.mkstemp(prefix="dustin-demo-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._title = title
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as output:
            # A session of its own: Ctrl-C ends the demo, which then ends the server.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        progress = Progress(self._title, len(STAGES))
        try:
            self._wait(self._process, progress)
        except BaseException:
            self.stop()
            raise
        finally:
            progress.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def get(self, path: str) -> httpx.Response:
        """Fetch a page of the server, around any proxy."""
        return httpx.get(self.url + path, timeout=30, follow_redirects=True, trust_env=False)

    def wait(self) -> None:
        """Return when the server has ended by itself."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End the server and everything that it started."""
        if self._process is not None:
            end_session(self._process.pid)
            self.wait()
            self._process = None

    def _wait(self, process: subprocess.Popen[bytes], progress: Progress) -> None:
        """Return when the server answers; raise ServerError when it ends or takes too long."""
        start, stage = time.monotonic(), 0
        while True:
            text = self.log.read_text(errors="replace")
            while stage < len(STAGES) and STAGES[stage][0] in text:
                progress.advance(STAGES[stage][1])
                stage += 1
            if process.poll() is not None:
                raise ServerError(self._explain(f"the server ended with status {process.returncode}"))
            if self._answers():
                return
            if time.monotonic() - start > self._timeout:
                raise ServerError(self._explain(f"the server did not answer within {self._timeout:.0f} s"))
            progress.refresh()
            time.sleep(0.5)

    def _answers(self) -> bool:
        """Whether the server is ready for requests."""
        try:
            return self.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _explain(self, what: str) -> str:
        """Return `what` happened with the end of the log and a remedy."""
        text = self.log.read_text(errors="replace")
        found = [remedy for pattern, remedy in REMEDIES if re.search(pattern, text)]
        remedy = found[0] if found else "the last error above says what is wrong"
        tail = "\n".join(f"    {line}" for line in text.splitlines()[-TAIL_LINES:])
        return f"{what}\n{tail}\n  remedy: {remedy}\n  whole log: {self.log}"


def end_session(leader: int) -> None:
    """End the processes of the session that the process `leader` began, whoever their parent is by now."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                members.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    for process in members:
        _signal(process, signal.SIGTERM)
    for process in psutil.wait_procs(members, timeout=5)[1]:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def launch_command(device: str, model: str, draft: str, budget: int, policy: str, context: int) -> list[str]:
    """Return the command that serves `model` with dustin.

    Parameters
    ----------
    device : str
        "cpu", or anything else for a GPU.
    model, draft : str
        Folders of the target and its draft.
    budget : int
        Positions that verification may read.
    policy : str
        Value of ``--dustin-policy``.
    context : int
        Tokens of the longest request. On a CPU the KV cache has room for little more: to fill a large one takes longer
        than anything else at start-up.

    Returns
    -------
    list of str
        The command, without the address.
    """
    common = ["--model-path", model, "--speculative-algorithm", "dustin", "--speculative-draft-model-path", draft]
    common += ["--dustin-budget", str(budget), "--dustin-policy", policy]
    common += ["--enable-metrics", "--mem-fraction-static", "0.6", "--max-running-requests", "8"]
    if device != "cpu":
        return [sys.executable, "-m", "sglang.launch_server", *common, "--disable-prefill-cuda-graph"]
    tokens = str(-(-2 * context // 1024) * 1024)
    options = ["--dtype", "float32", "--max-total-tokens", tokens, "--sleep-on-idle"]
    return [sys.executable, "-m", "dustin_sglang.cpu", "sglang.launch_server", *common, *options]
