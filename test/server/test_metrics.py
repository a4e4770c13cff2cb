"""The counters say what verification read, and SGLang's own speculation fields keep their identities."""

from __future__ import annotations

from serving import ON_CPU, Server
from words import words

BUDGET, PROTECTED = 64, 4 + 16


def test_counters_of_a_sparse_request(server: Server) -> None:
    """Counters of host numbers alone.

    SGLang #11144, undone by #11441, brought a metric that waited for the device: no test on a CPU sees such a wait;
    test/gpu/test_kernels.py forbids them in the chain of kernels.
    """
    before = server.metrics()
    meta = server.generate(words(300, first=11), 40, ignore_eos=True)["meta_info"]
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"dustin:{name}"] - before.get(f"dustin:{name}", 0.0)

    steps = grown("sparse_verify_steps_total")
    # Overlap scheduling, which the CPU engine lacks, launches a step before it sees that the last was the end.
    extra = steps - meta["spec_verify_ct"]
    assert steps == grown("verify_steps_total") and extra in ((0,) if ON_CPU else (0, 1))
    assert grown("selected_positions_total") == steps * BUDGET
    assert steps * 300 <= grown("context_positions_total") <= steps * 341
    assert after["dustin:budget_positions"] == BUDGET
    assert after["dustin:exact_tokens"] == 300 and 30 <= after["dustin:approximate_tokens"] <= 41 + 4 * extra
    by_source = {s: grown(f"selected_by_source_total[{s}]") for s in ("protected", "lookahead", "history")}
    assert by_source == {"protected": steps * PROTECTED, "lookahead": steps * 22, "history": steps * 22}
    # A run may be accepted past the last token asked for.
    assert 39 <= grown("accepted_tokens_total") <= 39 + 3 + 4 * extra


def test_speculation_fields_keep_their_identities(server: Server) -> None:
    """SGLang #33518: these identities; EAGLE #132, #143, #146, #153 and #195: the accept length has the bonus token."""
    meta = server.generate(words(200, first=5), 33, ignore_eos=True)["meta_info"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    assert meta["spec_num_proposed_drafts"] == meta["spec_verify_ct"] * 3
    assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"] > 0


def test_a_prompt_within_the_budget_is_not_counted_as_sparse(server: Server) -> None:
    before = server.metrics()
    server.generate(words(20, first=77), 8, ignore_eos=True)
    after = server.metrics()
    assert after["dustin:sparse_verify_steps_total"] == before["dustin:sparse_verify_steps_total"]
    assert after["dustin:verify_steps_total"] > before["dustin:verify_steps_total"]


def test_the_accept_length_of_this_pair_has_not_fallen(server: Server) -> None:
    """In vLLM #26191 the accept length fell and nobody saw. Target and draft are fixed, so its floor can be."""
    steps = tokens = 0
    for first in range(6):
        meta = server.generate(words(40, first=first), 60, ignore_eos=True)["meta_info"]
        steps, tokens = steps + meta["spec_verify_ct"], tokens + meta["completion_tokens"]
    assert tokens / steps > 1.15
