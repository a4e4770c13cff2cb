"""A program in SGLang's frontend language: gen, select, fork."""

from __future__ import annotations

import sglang as sgl
from serving import Server
from words import words


@sgl.function
def program(s: sgl.ProgramState, document: str) -> None:
    s += document + " "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"w{50 + i} " + sgl.gen("reply", max_tokens=6, temperature=0)
    s += branches[0]["reply"] + " " + branches[1]["reply"] + " "
    s += sgl.select("choice", choices=["w10", "w20 w30"])
    s += " " + sgl.gen("end", max_tokens=5, temperature=0)


def test_gen_select_and_fork(server: Server) -> None:
    backend = sgl.RuntimeEndpoint(server.url)
    states = [program.run(document=words(150), backend=backend) for _ in range(2)]
    for state in states:
        assert state["choice"] in ("w10", "w20 w30")
        assert len(state["end"].split()) == 5
    assert states[0].text() == states[1].text()
