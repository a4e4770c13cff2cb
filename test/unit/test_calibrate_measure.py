"""Calibration measures what it says: against attention that transformers computes, and against cases by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import TinyLlama, write_llama

from dustin_sglang.calibrate.mass import ListSize, captured_mass, listed_mass
from dustin_sglang.calibrate.needles import RetrievalMass
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.texts import Needle, Passage
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.calibrate.windows import collect

TARGET = TinyLlama(num_layers=3)
DRAFT = TinyLlama(hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=8, seed=4)
IDS = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(0)).tolist()
N, ROWS, SIZE = 50, 4, ListSize(budget=12, sinks=2, window=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pair")
    return {"target": write_llama(root / "target", TARGET), "draft": write_llama(root / "draft", DRAFT)}


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> tuple[TracedModel, TracedModel]:
    target, draft = (TracedModel(folders[role], "cpu", torch.float32) for role in ("target", "draft"))
    return target, draft


def eager_attention(folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 ``[layers, heads, tokens, tokens]`` of transformers' own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]


@pytest.mark.parametrize("extra_step", [False, True])
def test_a_window_holds_what_the_models_attend_to(
    folders: dict[str, Path], pair: tuple[TracedModel, TracedModel], extra_step: bool
) -> None:
    (window,), _ = collect(*pair, Passage(IDS, [N], None), ROWS, SIZE, extra_step)
    attention = eager_attention(folders["target"], IDS[: N + ROWS])
    torch.testing.assert_close(window.oracle, attention[:, :, N:, :N].sum((0, 1, 2)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(window.history.float(), attention[:, :, N - 1, :N], atol=2e-3, rtol=1e-3)
    # The draft reads from the second token on; its three or four rows see the committed slots; slot j speaks for j + 1.
    ahead = eager_attention(folders["draft"], IDS[1 : N + ROWS])[:, :, N - 1 : N + ROWS - 2 + extra_step, :N]
    ahead = (ahead / ahead.sum(-1, keepdim=True)).sum(2)
    assert (window.lookahead[:, :, 0] == 0).all()
    torch.testing.assert_close(window.lookahead[:, :, 1:].float(), ahead[:, :, :-1], atol=2e-3, rtol=1e-3)


def test_heads_are_ranked_by_the_mass_that_they_capture(pair: tuple[TracedModel, TracedModel]) -> None:
    (window,), _ = collect(*pair, Passage(IDS, [N], None), ROWS, SIZE)
    assert window.history_mass.shape == (3, 4) and window.lookahead_mass.shape == (2, 6)
    assert (window.history_mass <= 1).all() and (window.history_mass > 0).all()


def test_captured_mass_by_hand() -> None:
    # Ten positions, budget 5, sink 0 and newest 9: three of 1..8 are chosen. The best list holds 4 + 3 + 2 = 9.
    oracle = torch.tensor([50.0, 4, 0, 3, 0, 2, 1, 0, 0, 50])
    size = ListSize(budget=5, sinks=1, window=1)
    perfect, reverse = oracle, -oracle
    wrong = torch.tensor([0, 9.0, 9, 0, 0, 0, 9, 0, 0, 0])
    masses = captured_mass(torch.stack([perfect, reverse, wrong]), oracle, size)
    torch.testing.assert_close(masses, torch.tensor([1, 0, 5 / 9]))
    assert listed_mass(torch.tensor([0, 1, 2, 6, 9]), oracle, size) == pytest.approx(5 / 9)
    attention = torch.stack([oracle, torch.zeros(10)])
    lists = torch.tensor([[0, 1, 2, 6, 9], [0, 1, 3, 4, 9]])
    assert listed_mass(lists, attention, size) == pytest.approx(5 / 9), "layer by layer, in the single list's unit"


def test_retrieval_mass_is_the_attention_on_the_needle(
    folders: dict[str, Path], pair: tuple[TracedModel, TracedModel]
) -> None:
    needle = Needle(span=(10, 16), answer=(40, 44))
    retrieval = RetrievalMass(pair[0].shape, needle)
    logits = pair[0].read(IDS, retrieval.see, retrieval.rows)
    attention = eager_attention(folders["target"], IDS)
    torch.testing.assert_close(retrieval.mass, attention[:, :, 39:43, 10:16].sum(-1).mean(-1), atol=1e-5, rtol=1e-4)
    # It counts where the answer succeeds, and only there.
    spoken = list(IDS)
    spoken[40:44] = logits.argmax(-1).tolist()
    assert retrieval.counted(logits, spoken).equal(retrieval.mass)
    spoken[40:42] = [(token + 1) % 256 for token in spoken[40:42]]
    assert not retrieval.counted(logits, spoken).any(), "two of four tokens are not more than half"


def test_a_list_of_everything_verifies_as_the_model_itself(pair: tuple[TracedModel, TracedModel]) -> None:
    target = pair[0]
    prefix = Prefix(target, IDS)
    own = target.read(IDS[: N + ROWS], lambda layer: None, list(range(N, N + ROWS)))
    everything = torch.arange(N, dtype=torch.int32).unsqueeze(0)
    torch.testing.assert_close(prefix.verify(N, ROWS, everything)[0], own, atol=1e-4, rtol=1e-4)
    (outcome,) = prefix.compare(N, ROWS, everything)
    assert outcome.agreement == 1 and abs(outcome.kl) < 1e-5


def test_a_sparse_verification_is_attention_over_the_listed_positions_alone(tmp_path: Path) -> None:
    """In a model of one layer nothing else can reach the rows, so unlisted tokens may be anything."""
    model = TracedModel(write_llama(tmp_path / "model", TinyLlama(num_layers=1)), "cpu", torch.float32)
    listed = torch.tensor([[0, 1, 7, 30, N - 1]])
    changed = [token if i in listed[0] or i >= N else (token + 1) % 256 for i, token in enumerate(IDS)]
    verified = [Prefix(model, ids).verify(N, ROWS, listed) for ids in (IDS, changed)]
    torch.testing.assert_close(*verified)
    assert Prefix(model, IDS).compare(N, ROWS, listed)[0].kl > 0.01


def test_several_lists_at_once_are_as_one_by_one(pair: tuple[TracedModel, TracedModel]) -> None:
    lists = torch.stack([torch.arange(0, 10), torch.arange(20, 30), torch.arange(40, 50)] * 7)
    prefix = Prefix(pair[0], IDS)
    together = prefix.compare(N, ROWS, lists)
    assert len(together) == 21
    for one, outcome in zip(lists, together):
        (alone,) = prefix.compare(N, ROWS, one.unsqueeze(0))
        assert outcome.kl == pytest.approx(alone.kl, abs=1e-5) and outcome.agreement == alone.agreement


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no config.json"):
        TracedModel(tmp_path, "cpu", torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(CalibrationError, match="transformers cannot run"):
        TracedModel(tmp_path, "cpu", torch.float32)
