"""What each policy picks in a case small enough to do by hand, and what holds for all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_sglang.selection.policy import POLICIES, Budget

# Ten positions, budget 5: position 0 and 9 are protected, three are free.
LOOKAHEAD = torch.tensor([[9.0, 0, 7, 1, 0, 5, 0, 0, 0, 9]])
HISTORY = torch.tensor([[9.0, 0, 8, 6, 0, 1, 0, 0, 2, 9]])
LENGTH = torch.tensor([10])


def pick(name: str, share: float = 0.5, **changes: int) -> list[int]:
    policy = POLICIES[name]
    budget = policy.budget(5, changes.get("sinks", 1), changes.get("window", 1), share)
    lookahead = LOOKAHEAD if policy.uses_lookahead else None
    history = HISTORY if policy.uses_history else None
    return policy.select(budget, lookahead, history, LENGTH, 10)[0].tolist()


def test_hybrid_takes_lookahead_first_and_fills_with_history() -> None:
    # m = round(0.5 * 3) = 2: lookahead's best free ones are 2 and 5; of the rest history likes 3 best.
    assert pick("hybrid") == [0, 2, 3, 5, 9]
    # m = round(0.3 * 3) = 1: lookahead takes 2, history then takes 3 and 8 (2 is taken).
    assert pick("hybrid", share=0.3) == [0, 2, 3, 8, 9]


def test_lookahead_alone() -> None:
    assert pick("lookahead") == [0, 2, 3, 5, 9]


def test_history_alone() -> None:
    assert pick("history") == [0, 2, 3, 8, 9]


def test_streaming_reads_sinks_and_the_newest() -> None:
    assert pick("streaming", sinks=2) == [0, 1, 7, 8, 9]


def test_ties_go_to_the_lower_position() -> None:
    policy = POLICIES["lookahead"]
    equal = torch.ones(1, 10)
    assert policy.select(policy.budget(5, 1, 1, 0.5), equal, None, LENGTH, 10)[0].tolist() == [0, 1, 2, 3, 9]


def test_random_is_a_function_of_the_context_alone() -> None:
    policy = POLICIES["random"]
    budget = policy.budget(20, 2, 4, 0.5)
    lengths = torch.tensor([300, 1000, 300])
    lists = policy.select(budget, None, None, lengths, 1000)
    assert torch.equal(lists[0], lists[2])
    assert torch.equal(lists[1], policy.select(budget, None, None, lengths[1:2], 1000)[0])
    assert not torch.equal(lists[0], policy.select(budget, None, None, lengths[:1] + 1, 301)[0])
    # Spread over the context: not all in one half.
    free = lists[1][2:-4]
    assert (free < 500).any() and (free >= 500).any()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([n for n, p in POLICIES.items() if not p.dense]),
    total=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    share=st.floats(0, 1),
    data=st.data(),
)
def test_every_list_is_ascending_unique_and_exactly_the_budget(
    name: str, total: int, lengths: list[int], share: float, data: st.DataObject
) -> None:
    """ROCm/ATOM PR #2118: an indexer that drops the last positions. Sinks and window are in every list."""
    sinks = data.draw(st.integers(0, total))
    window = data.draw(st.integers(0, total - sinks))
    policy = POLICIES[name]
    budget = policy.budget(total, sinks, window, share)
    assert budget.protected + budget.lookahead + budget.history == total and budget.history >= 0
    max_len = max(lengths)
    seq_lens = torch.tensor(lengths)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scores = [torch.rand(len(lengths), max_len, generator=generator) for _ in range(2)]
    lists = policy.select(budget, *scores, seq_lens, max_len)
    assert lists.shape == (len(lengths), total) and lists.dtype == torch.int32
    for row, n in zip(lists.tolist(), lengths, strict=True):
        count = min(n, total)
        listed = row[:count]
        assert row[count:] == [-1] * (total - count)
        assert listed == sorted(set(listed)) and 0 <= listed[0] and listed[-1] < n
        if n <= total:
            assert listed == list(range(n))
        else:
            assert set(range(sinks)) <= set(listed)
            assert set(range(n - window, n)) <= set(listed)


def test_dense_has_no_list() -> None:
    assert POLICIES["dense"].dense
    assert POLICIES["dense"].budget(5, 1, 1, 0.5) == Budget(5, 1, 1, 0)


def test_the_policies_of_the_flag() -> None:
    assert set(POLICIES) == {"hybrid", "lookahead", "history", "streaming", "random", "dense"}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_says_what_it_does(name: str) -> None:
    assert POLICIES[name].name == name and POLICIES[name].__doc__
