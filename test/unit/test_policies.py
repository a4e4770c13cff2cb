"""What each policy picks in a case small enough to do by hand, and what holds for all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_sglang.config import ConfigError, DustinConfig
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies import POLICIES, Budget

# Ten positions, budget 5: position 0 and 9 are protected, three are free.
LOOKAHEAD = torch.tensor([[9.0, 0, 7, 1, 0, 5, 0, 0, 0, 9]])
HISTORY = torch.tensor([[9.0, 0, 8, 6, 0, 1, 0, 0, 2, 9]])


def context(*lengths: int) -> Context:
    """Requests of these lengths, at the slots 0, 1, and so on."""
    rows = torch.arange(len(lengths))
    return Context(torch.zeros(8, 128, dtype=torch.int32), rows, torch.tensor(lengths), max(lengths))


def pick(name: str, share: float = 0.5, **changes: int) -> list[int]:
    policy = POLICIES[name]()
    budget = policy.budget(5, changes.get("sinks", 1), changes.get("window", 1), share)
    lookahead = LOOKAHEAD if policy.uses_lookahead else None
    history = HISTORY if policy.uses_history else None
    return policy.select(budget, lookahead, history, context(10))[0].tolist()


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


def test_hybrid_depth_lists_by_lookahead_in_the_shallow_half_and_by_their_own_history_in_the_deep_half() -> None:
    policy = POLICIES["hybrid-depth"]()
    assert policy.history_groups(4) == 2
    history = torch.stack([HISTORY, HISTORY.flip(1)])
    lists = policy.select_groups(policy.budget(5, 1, 1, 0.5), LOOKAHEAD, history, context(10))
    ahead = pick("lookahead")
    assert lists[:, 0].tolist() == [ahead, ahead, pick("history"), [0, 1, 6, 7, 9]]


@pytest.mark.parametrize("groups", [None, 1, 3])
def test_hybrid_depth_needs_as_many_shallow_groups_as_deep_ones(groups: int | None) -> None:
    count = groups or 1  # what it would be unasked
    with pytest.raises(ConfigError, match=f"--dustin-layer-groups .* is {count} .*hybrid-depth: .*even number"):
        DustinConfig(policy="hybrid-depth", layer_groups=groups)
    assert DustinConfig(policy="hybrid-depth", layer_groups=count + 1)


def test_ties_go_to_the_lower_position() -> None:
    policy = POLICIES["lookahead"]()
    equal = torch.ones(1, 10)
    assert policy.select(policy.budget(5, 1, 1, 0.5), equal, None, context(10))[0].tolist() == [0, 1, 2, 3, 9]


def test_the_sum_weighs_both_signals_equally() -> None:
    # Lookahead gives 2: 7, 5: 5, 3: 1; history 2: 8, 3: 6, 8: 2, 5: 1.
    assert pick("hybrid-sum") == [0, 2, 3, 5, 9]
    policy = POLICIES["hybrid-sum"]()
    budget = policy.budget(5, 1, 1, 0.5)
    # Without a lookahead score at all, history decides.
    assert policy.select(budget, LOOKAHEAD * 0, HISTORY, context(10))[0].tolist() == [0, 2, 3, 8, 9]


def test_the_share_weighs_the_sum() -> None:
    assert pick("hybrid-sum", share=1.0) == pick("lookahead") == [0, 2, 3, 5, 9]
    assert pick("hybrid-sum", share=0.0) == pick("history") == [0, 2, 3, 8, 9]


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_the_sum_lists_the_best_of_the_weighed_signals(share: float, seed: int, lengths: list[int]) -> None:
    """With all or nothing one signal decides."""
    batch = context(*lengths)
    inside = torch.arange(max(lengths)) < batch.seq_lens.unsqueeze(1)
    # Sixteenths, so that there are ties.
    signals = torch.randint(0, 16, (2, *inside.shape), generator=torch.Generator().manual_seed(seed)) / 16 * inside
    ahead, back = (signal / signal.sum(1, keepdim=True).clamp(min=1e-9) for signal in signals)

    def lists(name: str, share: float, *scores: torch.Tensor | None) -> torch.Tensor:
        return POLICIES[name]().select(POLICIES[name]().budget(20, 2, 3, share), *scores, batch)

    assert torch.equal(lists("hybrid-sum", 1.0, ahead, back), lists("lookahead", 0.5, ahead, None))
    assert torch.equal(lists("hybrid-sum", 0.0, ahead, back), lists("history", 0.5, None, back))
    chosen = lists("hybrid-sum", share, ahead, back)
    score = (share * ahead.double() + (1 - share) * back.double())[:, : max(lengths)]
    for row, listed, n in zip(score, chosen.tolist(), lengths, strict=True):
        if n > 20:
            free = row[2 : n - 3]
            captured = row[[position for position in listed if 2 <= position < n - 3]].sum()
            assert captured >= free.topk(15).values.sum() - 1e-5


def test_quest_fills_the_budget_with_whole_pages() -> None:
    policy = POLICIES["quest"]()
    pages = torch.tensor([[0.1, 0.7, 0.2]]).repeat_interleave(16, dim=1)
    chosen = policy.select(policy.budget(24, 1, 1, 0.5), None, pages, context(48))[0].tolist()
    assert chosen == [0, *range(16, 32), *range(32, 38), 47], "the second page, then the third up to the budget"


class TestSnapKV:
    """Budget 5 of ten positions: 0 and the newest are protected."""

    def setup_method(self) -> None:
        self.policy = POLICIES["snapkv"]()
        self.budget = self.policy.budget(5, 1, 1, 0.5)

    def step(self, length: int, history: torch.Tensor | None = None) -> list[int]:
        scores = torch.zeros(1, length) if history is None else history
        return self.policy.select(self.budget, None, scores, context(length))[0].tolist()

    def test_the_list_of_the_prompt_stays_whatever_is_scored_later(self) -> None:
        assert self.step(10, HISTORY) == [0, 2, 3, 8, 9]
        assert self.step(10, HISTORY.flip(1)) == [0, 2, 3, 8, 9]

    def test_later_tokens_take_the_places_of_the_least_attended(self) -> None:
        self.step(10, HISTORY)  # 9 was listed for its place in the window and has the best score
        assert self.step(11) == [0, 2, 3, 9, 10]
        assert self.step(12) == [0, 2, 9, 10, 11]
        assert self.step(13) == [0, 9, 10, 11, 12]

    def test_when_later_tokens_exceed_the_budget_the_newest_stay(self) -> None:
        self.step(10, HISTORY)
        assert self.step(20) == [0, 16, 17, 18, 19]

    def test_a_prefill_starts_anew(self) -> None:
        self.step(10, HISTORY)
        self.policy.prefilled(torch.tensor([0]))
        assert self.step(10, HISTORY.flip(1)) == [0, 1, 6, 7, 9]

    def test_requests_keep_lists_of_their_own(self) -> None:
        scores = torch.cat([HISTORY, HISTORY.flip(1)])
        both = self.policy.select(self.budget, None, scores, context(10, 10)).tolist()
        assert both == [[0, 2, 3, 8, 9], [0, 1, 6, 7, 9]]
        assert self.policy.select(self.budget, None, scores * 0, context(10, 10)).tolist() == both

    def test_a_list_is_fixed_only_when_something_is_left_out(self) -> None:
        assert self.step(5) == [0, 1, 2, 3, 4]
        assert self.step(10, HISTORY) == [0, 2, 3, 8, 9]


def test_random_is_a_function_of_the_context_alone() -> None:
    policy = POLICIES["random"]()
    budget = policy.budget(20, 2, 4, 0.5)
    lists = policy.select(budget, None, None, context(300, 1000, 300))
    assert torch.equal(lists[0], lists[2])
    assert torch.equal(lists[1], policy.select(budget, None, None, context(1000))[0])
    assert not torch.equal(lists[0], policy.select(budget, None, None, context(301))[0])
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
    policy = POLICIES[name]()
    budget = policy.budget(total, sinks, window, share)
    assert budget.protected + budget.lookahead + budget.left == total and budget.left >= 0
    max_len = max(lengths)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    batch = context(*lengths)
    inside = torch.arange(max_len) < batch.seq_lens.unsqueeze(1)
    # The second round finds what a policy keeps between steps.
    for _ in range(2):
        scores = [torch.rand(len(lengths), max_len, generator=generator) * inside for _ in range(2)]
        lists = policy.select(budget, *scores, batch)
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
    assert POLICIES["dense"]().budget(5, 1, 1, 0.5) == Budget(5, 1, 1, 0)


def test_the_policies_of_the_flag() -> None:
    names = {
        "hybrid",
        "hybrid-sum",
        "hybrid-depth",
        "lookahead",
        "history",
        "quest",
        "snapkv",
        "streaming",
        "random",
        "dense",
    }
    assert set(POLICIES) == names


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_says_what_it_does(name: str) -> None:
    assert POLICIES[name].name == name and POLICIES[name].__doc__
