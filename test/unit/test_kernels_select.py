"""select_positions: kernel and reference against a sorting oracle in plain Python, and under adversarial scores."""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dustin_kernels import select, select_positions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Narrow programs: the interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_BLOCK", 256)
        yield


@pytest.fixture
def shortened(monkeypatch):
    """Shortlists of small chunks come first, also in short tests."""
    monkeypatch.setattr(select, "_BLOCK", 8)
    monkeypatch.setattr(select, "_CHUNK", (16, 32))


def oracle(lookahead, history, n, budget, sinks, window, num_lookahead):
    """What one request lists, from Python floats."""
    if n <= budget:
        return [*range(n), *[-1] * (budget - n)]
    chosen = {*range(sinks), *range(n - window, n)}
    for scores, count in ((lookahead, num_lookahead), (history, budget - sinks - window - num_lookahead)):
        worth = [s if s > 0 else 0.0 for s in (scores or [0.0] * n)]  # NaN > 0 is False
        rest = [p for p in range(n) if p not in chosen]
        chosen.update(sorted(rest, key=lambda p: (-worth[p], p))[:count])
    return sorted(chosen)


def check_batch(lookahead, history, seq_lens, backend, **policy):
    result = select_positions(
        lookahead, history, torch.tensor(seq_lens), backend=backend,
        out=torch.full((len(seq_lens), policy["budget"]), 12345, dtype=torch.int32), **policy,
    )  # fmt: skip
    for b, n in enumerate(seq_lens):
        rows = [None if scores is None else scores[b, :n].tolist() for scores in (lookahead, history)]
        assert result[b].tolist() == oracle(*rows, n, *policy.values())
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    #                           0    1    2    3    4    5    6    7    8    9
    lookahead = torch.tensor([[9.0, 9.0, 0.1, 0.5, 0.3, 0.5, 0.2, 0.0, 9.0, 9.0]])
    history = torch.tensor([[0.0, 0.0, 0.1, 9.0, 0.1, 0.0, 0.1, 0.2, 0.0, 0.0]])
    policy = dict(budget=6, sinks=1, window=1, num_lookahead=2)
    # sink 0, last 9; lookahead takes 1 and 8; history takes 3 (also second by lookahead), then 7
    assert select_positions(lookahead, history, torch.tensor([10]), backend=backend, **policy).tolist() == [
        [0, 1, 3, 7, 8, 9]
    ]
    # with three by lookahead, 3 and not its equal 5 is among them; history takes 7
    policy["num_lookahead"] = 3
    assert select_positions(lookahead, history, torch.tensor([10]), backend=backend, **policy).tolist() == [
        [0, 1, 3, 7, 8, 9]
    ]
    # no history: ties at zero go to the lowest positions left
    assert select_positions(lookahead, None, torch.tensor([10]), backend=backend, **policy).tolist() == [
        [0, 1, 2, 3, 8, 9]
    ]
    # the seventh and eighth positions do not exist for a context of 6
    assert select_positions(lookahead, history, torch.tensor([6]), backend=backend, **policy).tolist() == [
        [0, 1, 2, 3, 4, 5]
    ]
    assert select_positions(lookahead, history, torch.tensor([4]), backend=backend, **policy).tolist() == [
        [0, 1, 2, 3, -1, -1]
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("signals", ["both", "lookahead", "history", "none"])
@pytest.mark.parametrize("num_lookahead", [0, 11, 25])
def test_random_scores(backend, signals, num_lookahead):
    generator = torch.Generator().manual_seed(num_lookahead)
    seq_lens = [0, 40, 41, 64, 65, 129]
    lookahead = torch.rand(6, 129, generator=generator).softmax(1) if signals in ("both", "lookahead") else None
    history = torch.rand(6, 129, generator=generator) ** 9 if signals in ("both", "history") else None
    check_batch(lookahead, history, seq_lens, backend, budget=40, sinks=4, window=11, num_lookahead=num_lookahead)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_the_length_are_ignored(backend):
    lookahead, history = torch.rand(2, 90, generator=torch.Generator().manual_seed(1)).split(1)
    lookahead[:, 70:], history[:, 70:] = math.inf, math.inf
    check_batch(lookahead, history, [70], backend, budget=20, sinks=2, window=3, num_lookahead=8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alone_and_in_a_batch_are_equal(backend):
    lookahead, history = torch.rand(2, 4, 70, generator=torch.Generator().manual_seed(2))
    seq_lens = torch.tensor([70, 0, 61, 25])
    policy = dict(budget=24, sinks=3, window=5, num_lookahead=7)
    together = select_positions(lookahead, history, seq_lens, backend=backend, **policy)
    for b, n in enumerate(seq_lens.tolist()):
        width = max(n, 1)
        alone = select_positions(
            lookahead[b : b + 1, :width], history[b : b + 1, :width], seq_lens[b : b + 1], backend=backend, **policy
        )
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_untouched_neighbours(backend):
    wide = torch.rand(3, 200, generator=torch.Generator().manual_seed(3))
    buffer = torch.full((3, 30), 777, dtype=torch.int32)
    policy = dict(budget=16, sinks=2, window=2, num_lookahead=6)
    seq_lens = torch.tensor([80, 5, 33], dtype=torch.int32)
    select_positions(wide[:, 7:90], wide[:, 100:183], seq_lens, out=buffer[:, 4:20], backend=backend, **policy)
    dense = select_positions(
        wide[:, 7:90].contiguous(), wide[:, 100:183].contiguous(), seq_lens, backend=backend, **policy
    )
    assert torch.equal(buffer[:, 4:20], dense)
    assert (buffer[:, :4] == 777).all() and (buffer[:, 20:] == 777).all()


# Scores as bits: denormals, the largest finite number, infinities, NaN of both signs, negative numbers, -0; few
# distinct ones, so that most contexts are full of ties.
AWKWARD_BITS = [
    0x00000000, 0x00000001, 0x00000002, 0x007FFFFF, 0x00800000, 0x3EAAAAAB, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
    0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x80000000, -0x7FFFFFFF, -0x40800000, -0x00800000, -1,
]  # fmt: skip


@st.composite
def requests(draw):
    width = draw(st.integers(1, 100))
    seq_lens = draw(st.lists(st.integers(0, width), min_size=1, max_size=3))
    signals = []
    for _ in range(2):
        values = draw(
            st.lists(st.sampled_from(AWKWARD_BITS) | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)
        )
        picks = torch.randint(
            len(values), (len(seq_lens), width), generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        )
        bits = torch.tensor(values, dtype=torch.int32)[picks]
        signals.append(bits.view(torch.float32) if draw(st.integers(0, 5)) else None)
    budget = draw(st.integers(1, 40))
    sinks = draw(st.integers(0, budget))
    window = draw(st.integers(0, budget - sinks))
    num_lookahead = draw(st.integers(0, budget - sinks - window))
    policy = dict(budget=budget, sinks=sinks, window=window, num_lookahead=num_lookahead)
    return *signals, seq_lens, policy


@settings(max_examples=200, deadline=None)
@given(requests())
def test_awkward_scores(request):
    lookahead, history, seq_lens, policy = request
    budget, sinks, window = policy["budget"], policy["sinks"], policy["window"]
    result = check_batch(lookahead, history, seq_lens, "reference", **policy)
    for row, n in zip(result.tolist(), seq_lens):
        listed = row[: min(n, budget)]
        assert row[len(listed) :] == [-1] * (budget - len(listed))
        assert all(a < b for a, b in zip(listed, listed[1:])) and all(0 <= p < n for p in listed)
        assert {*range(min(n, sinks)), *range(max(n - window, 0), n)} <= set(listed)
        if n <= budget:
            assert listed == list(range(n))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@settings(max_examples=25, deadline=None)
@given(requests())
def test_awkward_scores_in_the_kernel(request):
    lookahead, history, seq_lens, policy = request
    check_batch(lookahead, history, seq_lens, "triton", **policy)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_awkward_scores_by_way_of_shortlists(shortened, request):
    lookahead, history, seq_lens, policy = request
    check_batch(lookahead, history, seq_lens, "triton", **policy)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("best", [0, 1, 2], ids=["first chunk", "second chunk", "ragged last chunk"])
def test_all_of_the_list_may_come_from_one_chunk(shortened, best):
    """The best by lookahead are also the best by history, so that history fills with what comes after them."""
    n, policy = 80, dict(budget=24, sinks=2, window=3, num_lookahead=9)
    lookahead = torch.rand(1, n, generator=torch.Generator().manual_seed(best))
    lookahead[0, 32 * best : 32 * best + 32] += 1
    check_batch(lookahead, lookahead.clone(), [n], "triton", **policy)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("block", [256, 8], ids=["whole", "shortlists"])
def test_equal_scores_across_chunks(monkeypatch, block):
    """The last tie of each signal lies in the second chunk."""
    monkeypatch.setattr(select, "_BLOCK", block)
    monkeypatch.setattr(select, "_CHUNK", (64, 64))
    lookahead, history = torch.full((1, 133), 0.25), torch.full((1, 133), 0.5)
    lookahead[0, :61], history[0, :73] = 0.125, 0.125
    check_batch(lookahead, history, [133], "triton", budget=80, sinks=4, window=8, num_lookahead=40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(budget=0), "budget is 0; it must be at least 1"),
        (dict(sinks=-1), "sinks is -1; it must be from 0 to 16"),
        (dict(sinks=17), "sinks is 17; it must be from 0 to 16"),
        (dict(window=-1), "window is -1; it must be from 0 to 12"),
        (dict(window=13), "window is 13; it must be from 0 to 12"),
        (dict(num_lookahead=-1), "num_lookahead is -1; it must be from 0 to 8"),
        (dict(num_lookahead=9), "num_lookahead is 9; it must be from 0 to 8"),
        (dict(history=torch.zeros(2, 8)), r"history has shape \(2, 8\)"),
        (dict(lookahead=torch.zeros(2, 9).half()), "lookahead is torch.float16"),
        (dict(seq_lens=torch.zeros(2)), "seq_lens is torch.float32"),
        (dict(out=torch.zeros(2, 16)), "out is torch.float32"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(
        lookahead=torch.zeros(2, 9), history=torch.zeros(2, 9), seq_lens=torch.ones(2, dtype=torch.int64),
        budget=16, sinks=4, window=4, num_lookahead=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        select_positions(**{**arguments, **change})
