"""Mixed traffic against a running server; each answer is checked as far as it can be known."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests
from soak_material import Material, Sampling
from soak_verdict import BEST, Answer, Difference, Reference, compare

NEW_TOKENS = 40  # of a reference
ANSWER_SECONDS = 300.0  # the longest wait for an answer; a first sampled request may compile a kernel
KINDS = ("exact", "sparse", "growing", "forced", "grammar", "turn", "aborts", "refused")
COUNTS = ("requests", *KINDS, "exact_uncached", "exact_retracted", "near_ties")


@dataclass(frozen=True)
class Load:
    """How much of it.

    Attributes
    ----------
    budget, context
        Positions that a verification reads, and tokens of the longest request with its answer.
    slots, running
        Tokens that the KV pool holds, and requests that the server runs at once.
    clients
        Requests at once, without bursts.
    burst, burst_seconds
        Requests of a burst, and the time from one burst to the next.
    tie
        Nats between the two best tokens up to which an answer may leave its reference: what rounding can turn.
    seed
        Of the clients' draws.
    stock
        Whether SGLang's own speculation answers, which takes what dustin refuses.
    """

    budget: int
    context: int
    slots: int
    running: int
    clients: int = 4
    burst: int = 16
    burst_seconds: float = 20.0
    tie: float = 0.0
    seed: int = 0
    stock: bool = False


@dataclass
class Traffic:
    """Clients, and what they saw.

    Attributes
    ----------
    counts
        Requests by kind; of the greedy ones that are compared, those that found no cached prefix or were retracted; and
        near ties.
    tokens
        Time and number of tokens of each answer.
    wrong
        What is wrong with an answer.
    differences
        All compared answers that are not their solo run's, wrong ones and near ties.
    errors
        Requests that got no answer; the clients stop at the first.
    """

    url: str
    material: Material
    load: Load
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    tokens: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end: float = 0.0

    def prepare(self, end: float) -> None:
        """Use every option once, then run the greedy requests alone, until `end` on the clock of `time.monotonic`.

        On a GPU the first request of a kind may wait minutes for a compiler.
        """
        for sampling in [*self.material.options, *(grammar for grammar, _ in self.material.grammars)]:
            self.ask(self.material.prompt(0, 20), 8, sampling).raise_for_status()
        room = min(self.load.budget, self.load.context) - NEW_TOKENS - 1
        lengths = sorted({max(2, int(room * share)) for share in (0.02, 0.1, 0.4, 0.7, 0.95)})
        for length in lengths:
            for start in (0, 101, 211):
                if time.monotonic() > end:
                    return
                prompt = self.material.prompt(start, length)
                sampling: Sampling = {"ignore_eos": True}
                answer = self.ask(prompt, NEW_TOKENS, sampling, return_logprob=True, top_logprobs_num=BEST).json()
                self.references.append(Reference.of(prompt, answer))

    def run(self, end: float) -> None:
        """Send requests until `end`; then wait for the last answers, cut short."""
        self._end = end
        with ThreadPoolExecutor(self.load.clients + 1) as pool:
            running = [pool.submit(self._client, self.load.seed * 1000 + i) for i in range(self.load.clients)]
            running.append(pool.submit(self._bursts, random.Random(self.load.seed)))
            while time.monotonic() < end and not self.errors:
                time.sleep(0.2)
            while not all(client.done() for client in running) and not self.errors:
                self._abort(abort_all=True)
                time.sleep(1)
            for client in running:
                client.result()

    def ask(self, prompt: list[int], new_tokens: int, sampling: Sampling, **fields: Any) -> requests.Response:
        """Send one request, greedy unless `sampling` says otherwise."""
        params = {"temperature": 0, "max_new_tokens": new_tokens} | sampling
        body = {"input_ids": prompt, "sampling_params": params} | fields
        return requests.post(f"{self.url}/generate", json=body, timeout=ANSWER_SECONDS)

    # -- clients -------------------------------------------------------------------------------------------------

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds = [self._exact, self._exact, self._exact, self._sparse, self._sparse, self._forced, self._grammar]
        kinds += [self._turns, self._left, self._aborted, self._refused]
        for _ in self._until_the_end():
            self._one(draw.choice(kinds), draw)

    def _bursts(self, draw: random.Random) -> None:
        """More requests at once than the server has room for."""
        with ThreadPoolExecutor(self.load.burst) as pool:
            for _ in self._until_the_end():
                until = time.monotonic() + self.load.burst_seconds
                kinds = [self._exact, draw.choice([self._growing, self._growing, self._sparse])] * (
                    self.load.burst // 2
                )
                list(pool.map(lambda kind: self._one(kind, draw), kinds))
                while time.monotonic() < min(until, self._end) and not self.errors:
                    time.sleep(0.2)

    def _until_the_end(self) -> Iterator[None]:
        while time.monotonic() < self._end and not self.errors:
            yield

    def _one(self, kind: Callable[[random.Random], None], draw: random.Random) -> None:
        try:
            kind(draw)
        except requests.RequestException as error:
            self._add(self.errors, f"{kind.__name__}: {error!r}")

    # -- kinds of requests ---------------------------------------------------------------------------------------

    def _exact(self, draw: random.Random) -> None:
        """A greedy request that a verification reads in full, perhaps with a stop token inside a run."""
        reference = draw.choice(self.references)
        if draw.random() < 0.3:
            stop = draw.choice(reference.ids)
            ends = self.material.ends | {stop}
            sampling: Sampling = {"stop_token_ids": [stop]}
        else:
            ends, sampling = frozenset(), {"ignore_eos": True}
        expected = reference.ids[: next((i + 1 for i, token in enumerate(reference.ids) if token in ends), NEW_TOKENS)]
        if answer := self._answer("exact", reference.prompt, NEW_TOKENS, sampling):
            self._compare(reference, expected, answer)

    def _compare(self, reference: Reference, expected: list[int], answer: Answer) -> None:
        meta = answer["meta_info"]
        self._count(*["exact_uncached"] * (not meta.get("cached_tokens")))
        self._count(*["exact_retracted"] * bool(meta.get("num_retractions")))
        difference = compare(reference, expected, answer)
        if difference is None:
            return
        self._add(self.differences, difference)
        if difference.is_tie(self.load.tie):
            self._count("near_ties")
        else:
            self._wrong(str(difference))

    def _sparse(self, draw: random.Random) -> None:
        """A long request with any option; its length is all that is known."""
        new_tokens = draw.randrange(8, 3 * NEW_TOKENS)  # as many as an option's min_new_tokens
        answer = self._answer("sparse", self._long(draw, new_tokens), new_tokens, draw.choice(self.material.options))
        if answer and not 1 <= len(answer["output_ids"]) <= new_tokens:
            self._wrong(f"{len(answer['output_ids'])} tokens, not {new_tokens}")

    def _growing(self, draw: random.Random) -> None:
        """One of many that fit in the pool together when they start and no longer when they end."""
        share = self.load.slots // self.load.running
        new_tokens = min(share * 3 // 4, 1000)
        prompt = self.material.prompt(draw.randrange(len(self.material.tokens)), share - new_tokens // 2)
        answer = self._answer("growing", prompt, new_tokens, {"ignore_eos": True})
        if answer and len(answer["output_ids"]) != new_tokens:
            self._wrong(f"growing: {len(answer['output_ids'])} tokens, not {new_tokens}")

    def _forced(self, draw: random.Random) -> None:
        """A long request whose every token logit_bias decides."""
        sampling = {"logit_bias": {str(self.material.forced): 100}, "ignore_eos": True}
        answer = self._answer("forced", self._long(draw, NEW_TOKENS), NEW_TOKENS, sampling)
        if answer and answer["output_ids"] != [self.material.forced] * NEW_TOKENS:
            self._wrong(f"logit_bias: {answer['output_ids']}")

    def _grammar(self, draw: random.Random) -> None:
        sampling, pattern = draw.choice(self.material.grammars)
        answer = self._answer("grammar", self._long(draw, NEW_TOKENS), NEW_TOKENS, sampling | {"temperature": 0.7})
        ended = answer and answer["meta_info"]["finish_reason"]["type"] == "stop"
        if answer and ended and not re.fullmatch(pattern, "".join(answer["text"].split())):
            self._wrong(f"{sampling}: {answer['text']!r}")

    def _turns(self, draw: random.Random) -> None:
        """A second turn behind the answer of the first."""
        prompt = self._long(draw, 3 * NEW_TOKENS)
        if first := self._answer("turn", prompt, NEW_TOKENS, {"ignore_eos": True}):
            more = self.material.prompt(draw.randrange(len(self.material.tokens)), NEW_TOKENS // 2)
            second = self._answer("turn", prompt + first["output_ids"] + more, NEW_TOKENS, {"ignore_eos": True})
            if second and len(second["output_ids"]) != NEW_TOKENS:
                self._wrong(f"second turn: {len(second['output_ids'])} tokens")

    def _left(self, draw: random.Random) -> None:
        """A client that goes away: in mid-stream, or before its first token."""
        self._count("requests", "aborts")
        params = {"temperature": 0, "max_new_tokens": 10 * NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": self._long(draw, 10 * NEW_TOKENS), "sampling_params": params, "stream": True}
        patience = draw.choice([draw.random() / 4, ANSWER_SECONDS])
        try:
            with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=(10, patience)) as response:
                for _, _line in zip(range(draw.randrange(1, 8)), response.iter_lines()):
                    pass
        except (requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError) as error:
            if "timed out" not in str(error):  # otherwise its patience has ended
                raise

    def _aborted(self, draw: random.Random) -> None:
        """An abort by id, wherever the request is by then."""
        self._count("requests", "aborts")
        rid, new_tokens = f"aborted {draw.random()}", 10 * NEW_TOKENS
        with ThreadPoolExecutor(1) as pool:
            prompt = self._long(draw, new_tokens)
            asked = pool.submit(self.ask, prompt, new_tokens, {"ignore_eos": True}, rid=rid)
            time.sleep(draw.random())
            while not asked.done():
                self._abort(rid=rid)  # the first may come before the request
                time.sleep(0.5)
            response = asked.result()
        if response.ok:
            self._add(self.tokens, (time.monotonic(), len(response.json()["output_ids"])))
        else:
            self._wrong(f"aborted: {response.status_code} {response.text[:200]}")

    def _refused(self, draw: random.Random) -> None:
        sampling = draw.choice([{"min_p": 0.1, "temperature": 1}, {"regex": "(w1"}, {"max_new_tokens": 10**7}])
        self._count("requests", "refused")
        status = self.ask(self.material.prompt(0, 30), 8, sampling).status_code
        accepted = self.load.stock and "min_p" in sampling
        if status != (200 if accepted else 400) and time.monotonic() < self._end:
            self._wrong(f"{sampling}: status {status}")

    # -- what they share -----------------------------------------------------------------------------------------

    def _long(self, draw: random.Random, new_tokens: int) -> list[int]:
        """A prompt, mostly longer than the budget; half of them reach back into what earlier ones left in the cache."""
        longest = self.load.context - new_tokens - 64
        length = draw.randrange(min(self.load.budget, longest // 2), longest)
        start = draw.choice([0, draw.randrange(len(self.material.tokens))])
        return self.material.prompt(start, length)

    def _answer(self, kind: str, prompt: list[int], new_tokens: int, sampling: Sampling) -> Answer | None:
        """An answer that ran to its end, counted; None where there is none, which is wrong unless time was up."""
        self._count("requests", kind)
        response = self.ask(prompt, new_tokens, sampling)
        if not response.ok:
            fault = f"status {response.status_code} {response.text[:200]}"
        else:
            answer = response.json()
            self._add(self.tokens, (time.monotonic(), len(answer["output_ids"])))
            reason = answer["meta_info"]["finish_reason"]
            if reason["type"] != "abort":
                return answer
            fault = str(reason)
        if time.monotonic() < self._end:
            self._wrong(f"{kind}: {fault}")
        return None

    def _abort(self, **which: Any) -> None:
        try:
            requests.post(f"{self.url}/abort_request", json=which, timeout=30)
        except requests.RequestException as error:
            self._add(self.errors, f"abort: {error!r}")

    def _count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def _wrong(self, what: str) -> None:
        self._add(self.wrong, what)

    def _add(self, where: list, what: Any) -> None:
        with self._lock:
            where.append(what)
