"""The counters say what verification read, and SGLang's own speculation fields keep their identities."""

from __future__ import annotations

from serving import Server
from words import words

BUDGET, PROTECTED = 64, 4 + 16


def test_counters_of_a_sparse_request(server: Server) -> None:
    before = server.metrics()
    meta = server.generate(words(300, first=11), 40, ignore_eos=True)["meta_info"]
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"dustin:{name}"] - before.get(f"dustin:{name}", 0.0)

    steps = grown("sparse_verify_steps_total")
    assert steps == grown("verify_steps_total") == meta["spec_verify_ct"]
    assert grown("selected_positions_total") == steps * BUDGET
    assert steps * 300 <= grown("context_positions_total") <= steps * 341
    assert after["dustin:budget_positions"] == BUDGET
    assert after["dustin:exact_tokens"] == 300 and 30 <= after["dustin:approximate_tokens"] <= 41
    by_source = {s: grown(f"selected_by_source_total[{s}]") for s in ("protected", "lookahead", "history")}
    assert by_source == {"protected": steps * PROTECTED, "lookahead": steps * 22, "history": steps * 22}
    # A run may be accepted past the last token asked for.
    assert 39 <= grown("accepted_tokens_total") <= 39 + 3


def test_speculation_fields_keep_their_identities(server: Server) -> None:
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
