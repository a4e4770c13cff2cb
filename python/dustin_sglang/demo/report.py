"""What the two servers did, side by side: for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dustin_sglang.demo.case import Case
from dustin_sglang.demo.client import Answer
from dustin_sglang.demo.counters import Counts


@dataclass(frozen=True)
class Report:
    """The content of ``--json``: its keys are these attributes. Shares are of the positions that verification read."""

    device: str
    model: str
    context_tokens: int
    budget: int
    sparse_verify_steps: int
    mean_selected: float
    accept_length: float
    policy: str
    draft_kind: str
    selected_share_lookahead: float
    selected_share_history: float
    selected_share_protected: float
    answer: str
    dense_answer: str
    expected: str | None
    found: bool | None
    first_divergence: int | None
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return what ``json.dump`` takes."""
        return asdict(self)


def first_divergence(tokens: list[int], other: list[int]) -> int | None:
    """Return the first index at which two token sequences differ, or None when they are the same."""
    for index, (one, two) in enumerate(zip(tokens, other, strict=False)):
        if one != two:
            return index
    return None if len(tokens) == len(other) else min(len(tokens), len(other))


def render(report: Report, sparse: Answer, dense: Answer, counts: Counts, dense_accept: float, case: Case) -> str:
    """Return the comparison as text for a terminal."""
    if report.sparse_verify_steps:
        share = report.mean_selected / counts.mean_context
        read = f"{report.mean_selected:.0f} of {counts.mean_context:.0f} positions ({share:.0%})"
    else:
        read = "all: the context fits in the budget, or the policy is dense"
    names = {"protected": "first and last"}
    sources = ", ".join(f"{counts.share(source):.0%} {names.get(source, source)}" for source in counts.sources)
    rows = [
        ("", report.policy, "dense"),
        ("a verification read", read, "all positions"),
        ("chosen by", sources if report.sparse_verify_steps else "-", "-"),
        ("tokens a verification", f"{report.accept_length:.2f}", f"{dense_accept:.2f}"),
        ("until the answer began", f"{sparse.first_token:.1f} s", f"{dense.first_token:.1f} s"),
        ("from then until its end", *(f"{one.seconds - one.first_token:.1f} s" for one in (sparse, dense))),
    ]
    if case.expected is not None:
        rows.append(
            (f"has '{case.expected}'", *("yes" if case.expected in one.text else "NO" for one in (sparse, dense)))
        )
    if report.first_divergence is None:
        agreement = "the two answers are the same, token for token"
    else:
        agreement = f"the two answers differ from token {report.first_divergence} on"
    wide = max(len(row[0]) for row in rows)
    middle = max(len(row[1]) for row in rows)
    table = "\n".join(f"{name:<{wide}}  {one:<{middle}}  {two}".rstrip() for name, one, two in rows)
    return f"{table}\n{agreement}; {report.seconds:.0f} s in all"
