"""The death of a scheduler process is loud, and the next start is clean."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from serving import serve, small_budget
from words import words


@pytest.mark.slow
def test_a_killed_scheduler_is_a_loud_end_and_the_next_start_is_clean(tiny: dict[str, str]) -> None:
    prompt = words(600)
    with serve(*small_budget(tiny)) as server:
        answer = server.generate(prompt, 20)["output_ids"]
        scheduler = next(p for p in psutil.Process(server.pid).children(recursive=True) if "scheduler" in p.name())
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(server.post, 1500, {"ignore_eos": True}, text=prompt)
            time.sleep(1)
            scheduler.kill()
            with pytest.raises(requests.RequestException):  # the client is not left waiting
                hanging.result(timeout=60).raise_for_status()
        status = psutil.Process(server.pid).wait(60)
        assert status not in (None, 0), "the launcher ends, and not as if all were well"
        assert f"scheduler_0 (pid={scheduler.pid}) crashed with exit code -9" in server.log.read_text()
    with serve(*small_budget(tiny)) as server:
        assert server.generate(prompt, 20)["output_ids"] == answer
