"""The demo against a fake server that speaks enough of the API: no model, no SGLang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dustin_sglang.demo import __main__ as demo
from dustin_sglang.demo.case import load_case, read_document
from dustin_sglang.demo.client import ask, curl_line
from dustin_sglang.demo.counters import Counts, parse_counters
from dustin_sglang.demo.report import first_divergence
from dustin_sglang.demo.server import Server, ServerError, launch_command

EXPECTED = "Heron of Malvern, 4719"
# Answers with argument 1, word by word. Argument 2 is what goes wrong: "dies" or "hangs" at start-up, or "".
FAKE_SERVER = """
import http.server, json, subprocess, sys, time

answer, fault = sys.argv[1], sys.argv[2]
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "\\nserver_args=...\\nLoad weight begin", flush=True)
if fault == "dies":
    child.kill()
    sys.exit("ValueError: --dustin-budget 3 is out of range")
asked, started = 0, time.monotonic()


class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body, kind="text/plain"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/health":
            return self.reply(200 if not fault and time.monotonic() > started + 1 else 503, "")
        steps = 4 + 10 * asked  # the warm-up verified 4 times, each question 10 times, 8 of them sparsely
        counts = {"verify_steps": steps, "sparse_verify_steps": 8 * asked, "selected_positions": 8 * 512 * asked,
                  "context_positions": 8 * 4600 * asked, "accepted_tokens": 4 + 25 * asked}
        page = "".join(f"# TYPE dustin:{k}_total counter\\ndustin:{k}_total {v}.0\\n" for k, v in counts.items())
        page += "# TYPE dustin:selected_by_source_total counter\\n"
        for source, share in (("lookahead", 222), ("history", 222), ("protected", 68)):
            page += f'dustin:selected_by_source_total{{source="{source}"}} {8 * share * asked}.0\\n'
        self.reply(200, page + '# TYPE sglang:other gauge\\nsglang:other{source="x"} 7.0\\n')

    def do_POST(self):
        global asked
        asked += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "too long" in request["messages"][0]["content"]:
            return self.reply(400, json.dumps({"message": "longer than the context"}), "application/json")
        assert request["stream"] and request["temperature"] == 0
        chunks = [{"delta": {"content": word + " "}} for word in answer.split()]
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        events = [base | {"choices": [chunk | {"index": 0}]} for chunk in chunks]
        usage = {"prompt_tokens": 4595, "completion_tokens": 9, "total_tokens": 4604}
        events.append(base | {"choices": [], "usage": usage})
        body = "".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n"
        self.reply(200, body, "text/event-stream")


http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
RIGHT = f"The password is the {EXPECTED}."


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """Write the fake server and return its file."""
    file = tmp_path / "fake_server.py"
    file.write_text(FAKE_SERVER)
    return file


def command(fake: Path, answer: str = RIGHT, fault: str = "") -> list[str]:
    """Return the command that runs the fake server."""
    return [sys.executable, str(fake), answer, fault]


def child_of(server: Server) -> int:
    """Return the process that a fake server started, from its log."""
    return int(server.log.read_text().split()[1])


def test_server_is_up_inside_the_block_and_gone_after(fake: Path) -> None:
    """The block runs once /health says 200; afterwards neither the server nor its child is there."""
    with Server(command(fake), "starting") as server:
        assert server.get("/health").status_code == 200
        child = child_of(server)
        assert psutil.pid_exists(child)
    assert not psutil.pid_exists(child)
    with pytest.raises(Exception, match="refused"):
        server.get("/health")


def test_server_is_gone_after_an_error(fake: Path) -> None:
    """An exception in the block takes the server and its child down too."""
    with pytest.raises(ZeroDivisionError), Server(command(fake), "starting") as server:
        child = child_of(server)
        raise ZeroDivisionError
    assert not psutil.pid_exists(child)


def test_server_that_dies_shows_its_log_and_a_remedy(fake: Path) -> None:
    """The message has the status, the end of the log and what to do."""
    with pytest.raises(ServerError) as caught, Server(command(fake, fault="dies"), "starting"):
        pass
    message = str(caught.value)
    assert "ended with status 1" in message
    assert "--dustin-budget 3 is out of range" in message
    assert "remedy: " in message


def test_server_that_hangs_is_given_up(fake: Path) -> None:
    """After the time-out the server is taken down."""
    server = Server(command(fake, fault="hangs"), "starting", timeout=2)
    with pytest.raises(ServerError, match="did not answer within 2 s"), server:
        pass
    assert not psutil.pid_exists(child_of(server))


def test_taken_port() -> None:
    """A port that is taken is said at once, not after a server has loaded its model."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ServerError, match="choose another one with --port"):
            Server(["true"], "starting", port=other.getsockname()[1])


def test_ask_streams_the_answer(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is printed and returned, with the server's count of the prompt."""
    with Server(command(fake), "starting") as server:
        answer = ask(server.url, "Who?", "reading")
    assert answer.text.split() == RIGHT.split()
    assert answer.prompt_tokens == 4595
    assert 0 < answer.first_token <= answer.seconds
    assert RIGHT in capsys.readouterr().out


def test_counts_are_differences(fake: Path) -> None:
    """What the warm-up counted is left out, and other metrics do not matter."""
    with Server(command(fake), "starting") as server:
        before = parse_counters(server.get("/metrics").text)
        ask(server.url, "Who?", "reading")
        counts = Counts(before, parse_counters(server.get("/metrics").text))
    assert before["verify_steps"] == 4
    assert counts.sparse_steps == 8
    assert (counts.accept_length, counts.mean_selected, counts.mean_context) == (2.5, 512, 4600)
    assert counts.share("lookahead") == counts.share("history") == 222 / 512
    assert counts.share("protected") == 68 / 512
    assert counts.sources == ["lookahead", "history", "protected"]


def test_counts_of_several_processes_add_up() -> None:
    """Samples that differ in another label are one counter."""
    page = '# TYPE dustin:verify_steps_total counter\ndustin:verify_steps_total{pid="1"} 2\n'
    counters = parse_counters(page + 'dustin:verify_steps_total{pid="2"} 3\n')
    assert counters == {"verify_steps": 5}
    assert Counts(counters, counters).accept_length == 0.0


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [5], 0)],
)
def test_first_divergence(one: list[int], two: list[int], expected: int | None) -> None:
    """A sequence that ends early differs where it ends."""
    assert first_divergence(one, two) == expected


def test_shipped_case() -> None:
    """The phrase stands once, far from both ends, the header is not sent, and the question does not give it away."""
    case = load_case()
    assert case.expected is not None and case.depth is not None
    assert case.document.count(case.expected) == 1
    assert 0.2 < case.depth < 0.8
    assert not case.document.startswith("#")
    assert case.expected not in case.question
    assert case.prompt.endswith(case.question)
    assert len(case.document.split()) > 3200  # more than 4,000 tokens


def test_own_case(tmp_path: Path) -> None:
    """The shipped phrase belongs to the shipped document and question only."""
    file = tmp_path / "own.txt"
    file.write_text("# a comment\n# another\nText.\n# part of the text\n")
    assert read_document(file) == "Text.\n# part of the text"
    assert load_case(file, "Why?").expected is None
    assert load_case(file, "Why?", "so").expected == "so"
    assert load_case(question="Why?").expected is None
    with pytest.raises(ValueError, match="--question"):
        load_case(file)


def test_launch_commands() -> None:
    """The CPU is reached through the project's module, a GPU through SGLang's own; both get the settings."""
    cpu = launch_command("cpu", "M", "D", 512, "hybrid", 5000)
    gpu = launch_command("NVIDIA H200", "M", "D", 512, "hybrid", 5000)
    assert cpu[1:4] == ["-m", "dustin_sglang.cpu", "sglang.launch_server"]
    assert gpu[1:3] == ["-m", "sglang.launch_server"]
    assert "--dtype" in cpu and "--dtype" not in gpu
    assert int(cpu[cpu.index("--max-total-tokens") + 1]) >= 2 * 5000
    for line in (cpu, gpu):
        joined = " ".join(line)
        assert "--speculative-algorithm dustin --speculative-draft-model-path D" in joined
        assert "--dustin-budget 512 --dustin-policy hybrid" in joined
        assert "--enable-metrics" in joined


class Words:
    """A tokenizer: one token a word."""

    def encode(self, text: str, **options: bool) -> list[int]:
        """Return a number for each word."""
        return [sum(word.encode()) for word in text.split()]


@pytest.fixture
def models(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the fake server in SGLang's place, and return the arguments that name its models."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    def fake_command(device: str, model: str, draft: str, budget: int, policy: str, context: int) -> list[str]:
        return command(fake, {"dense": RIGHT, "streaming": "No idea."}.get(policy, f"{RIGHT} Indeed."))

    monkeypatch.setattr(demo, "launch_command", fake_command)
    monkeypatch.setattr(demo, "load_tokenizer", lambda model: Words())
    monkeypatch.setattr(demo, "find_device", lambda: "cpu")
    return ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def test_whole_demo(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both answers are compared, and the JSON has exactly the promised keys."""
    assert demo.main([*models, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    seconds = result.pop("seconds")
    assert seconds > 1
    assert result.pop("answer").split() == [*RIGHT.split(), "Indeed."]
    assert result.pop("dense_answer").split() == RIGHT.split()
    assert result == {
        "device": "cpu",
        "model": "target",
        "context_tokens": 4595,
        "budget": 512,
        "sparse_verify_steps": 8,
        "mean_selected": 512.0,
        "accept_length": 2.5,
        "policy": "hybrid-sum",
        "draft_kind": "standalone",
        "selected_share_lookahead": 222 / 512,
        "selected_share_history": 222 / 512,
        "selected_share_protected": 68 / 512,
        "expected": EXPECTED,
        "found": True,
        "first_divergence": len(RIGHT.split()),
    }
    out = capsys.readouterr().out
    assert "512 of 4600 positions (11%)" in out
    assert f"differ from token {len(RIGHT.split())} on" in out


def test_wrong_answer_is_said(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer without the phrase is reported as such."""
    assert demo.main([*models, "--policy", "streaming", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["found"] is False
    assert "NO" in capsys.readouterr().out


def test_request_error_is_a_message(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that the server refuses ends the demo with its reason."""
    (tmp_path / "own.txt").write_text("too long")
    assert demo.main([*models, "--document", str(tmp_path / "own.txt"), "--question", "Why?"]) == 1
    assert "longer than the context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--json", "x"], "leave one of them out"),
        (["--model", "nowhere"], "--model needs a --draft"),
        (["--model", "nowhere", "--draft", "nowhere"], "is no model folder"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that make no sense are refused before anything starts."""
    with pytest.raises(SystemExit) as caught:
        demo.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_serve_stays_until_it_is_stopped(models: list[str], fake: Path, tmp_path: Path) -> None:
    """--serve prints a curl line and stays; SIGTERM to the demo alone takes the server down."""
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys\n"
        "from dustin_sglang.demo import __main__ as demo\n"
        f"demo.launch_command = lambda *a: {command(fake)!r}\n"
        "demo.load_tokenizer = lambda model: type('T', (), {'encode': lambda self, text, **o: text.split()})()\n"
        "demo.find_device = lambda: 'cpu'\n"
        "sys.exit(demo.main(sys.argv[1:]))\n"
    )
    source = str(Path(demo.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script), *models, "--serve"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or "curl" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    log = Path(lines[-2].rsplit(" ", 1)[1].strip())
    url = lines[-1].split()[1].split("/v1")[0]
    assert curl_line(url) in lines[-1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    child = int(log.read_text().split()[1])
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(child)
