"""Where an answer leaves its solo run, and whether rounding can turn it there.

In bfloat16 an answer depends on what ran beside it: kernels of another batch size or chunk round otherwise, and so does
KV that another request left in the cache. An answer may therefore leave its solo run where the two tokens are about
equally probable. How probable is read from the solo run, which was rounded as well; `float32_gaps` asks the same model
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dense_judge import load_judge, preference

BEST = 5  # tokens whose log-probabilities a reference keeps
ROUNDING = 1e-3  # nats: of log-probabilities in float32, whose differences are multiples of bfloat16's last bit
REPORTED = 40  # differences that a row names
Answer = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The solo run of a greedy request that a verification reads in full.

    Attributes
    ----------
    prompt, ids
        Token ids of the request and of its answer.
    best
        Log-probabilities (nats) of the `BEST` tokens at each place of the answer.
    """

    prompt: list[int]
    ids: list[int]
    best: list[dict[int, float]]

    @classmethod
    def of(cls, prompt: list[int], answer: Answer) -> Reference:
        """Read an answer that was asked for with ``top_logprobs_num``."""
        best = [{row[1]: row[0] for row in rows} for rows in answer["meta_info"]["output_top_logprobs"]]
        return cls(prompt, answer["output_ids"], best)

    def gap(self, at: int, token: int) -> float:
        """Nats from the best token at place `at` down to another; to the last that is known where that one is not."""
        best = self.best[at]
        return round(max(best.values()) - best.get(token, min(best.values())), 4)


@dataclass(frozen=True)
class Difference:
    """An answer that is not its solo run's.

    Attributes
    ----------
    reference, got
        The solo run, and the answer's ids.
    at
        First place where the tokens differ; None where one answer only ends earlier, which no rounding explains.
    gap
        `Reference.gap` there; None without a place.
    cached_tokens, retractions
        Prompt tokens that the request found in the radix cache, and how often the server took its KV away.
    """

    reference: Reference
    got: list[int]
    at: int | None
    gap: float | None
    cached_tokens: int
    retractions: int

    def is_tie(self, tie: float) -> bool:
        """Whether rounding of up to `tie` nats explains it."""
        return self.gap is not None and self.gap <= tie + ROUNDING

    def row(self, tie: float, float32_gap: float | None) -> Answer:
        """Fields for a result file."""
        return dict(
            prompt=len(self.reference.prompt),
            at=self.at,
            gap=self.gap,
            float32_gap=float32_gap,
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            wrong=not self.is_tie(tie),
        )

    def __str__(self) -> str:
        how = "another length" if self.at is None else f"token {self.at}, gap {self.gap}"
        served = f"{self.cached_tokens} tokens cached, {self.retractions} retractions"
        return f"prompt of {len(self.reference.prompt)}: {how}, {served}: {self.got} and not {self.reference.ids}"


def compare(reference: Reference, expected: list[int], answer: Answer) -> Difference | None:
    """Compare an answer with the part of its solo run that it should give; None where it does."""
    got = answer["output_ids"]
    if got == expected:
        return None
    at = next((i for i, (one, other) in enumerate(zip(got, expected, strict=False)) if one != other), None)
    gap = None if at is None else reference.gap(at, got[at])
    meta = answer["meta_info"]
    return Difference(reference, got, at, gap, meta.get("cached_tokens", 0), meta.get("num_retractions", 0))


def report(model: str, differences: Sequence[Difference], tie: float) -> list[Answer]:
    """Rows of the `REPORTED` differences with the largest gaps, those of another length first.

    Parameters
    ----------
    model
        The target, which is loaded in float32 if there is anything to ask: not beside a server that needs the memory.
    tie
        As `Difference.is_tie`.
    """
    order = sorted(differences, key=lambda d: -(float("inf") if d.gap is None else d.gap))[:REPORTED]
    return [d.row(tie, gap) for d, gap in zip(order, float32_gaps(model, order), strict=True)]


def float32_gaps(model: str, differences: Sequence[Difference]) -> list[float | None]:
    """Nats by which the model in float32 prefers the solo run's token, negative where it prefers the answer's."""
    judge = load_judge(model) if any(d.at is not None for d in differences) else None
    gaps: list[float | None] = []
    for d in differences:
        if d.at is None:
            gaps.append(None)
            continue
        shared = d.reference.prompt + d.reference.ids[: d.at]
        gaps.append(round(preference(judge, shared, d.reference.ids[d.at], d.got[d.at]), 4))
    return gaps
