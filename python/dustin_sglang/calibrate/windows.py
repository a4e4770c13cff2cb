"""Windows: what one verification attends to, and what every head that could have chosen for it says.

A window stands at a committed length n of a real text. The verified rows are the text's own tokens n .. n + rows - 1
(teacher forced: as if all drafts were right). As SGLang runs them (0.5.17, `EAGLEWorkerV2`):

- the target verifies tokens n ..; the query that history keeps is that of token n - 1;
- the draft's slot j holds token j + 1, so it reads the text from its second token on. Its rows are those of the slots
  n - 1 .. n + rows - 3 (tokens n .. n + rows - 2), over the slots 0 .. n - 1. With one draft step more there is a row
  for the last token too, that of slot n + rows - 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.mass import ListSize, captured_mass
from dustin_sglang.calibrate.needles import RetrievalMass
from dustin_sglang.calibrate.texts import Needle, Passage
from dustin_sglang.calibrate.trace import Layer, TracedModel, attention_weights


@dataclass(frozen=True)
class Window:
    """One verification and the scores of all candidates for it.

    Attributes
    ----------
    attention
        float32 ``[layers, n]``, of the target's verified rows, summed over rows and heads.
    lookahead, history
        float16 ``[layers, heads, n]``, scores of draft and target, summed over the rows.
    lookahead_mass, history_mass
        float32 ``[layers, heads]``, captured mass of each query head by itself.
    """

    attention: torch.Tensor
    lookahead: torch.Tensor
    history: torch.Tensor
    lookahead_mass: torch.Tensor
    history_mass: torch.Tensor

    @property
    def oracle(self) -> torch.Tensor:
        """float32 ``[n]``, attention summed over layers too."""
        return self.attention.sum(0)


class _Scores:
    """Scores of every head of one model at several committed lengths, filled layer by layer."""

    def __init__(self, model: TracedModel, lengths: list[int]) -> None:
        shape = model.shape
        self.by_length = {
            n: torch.zeros(shape.layers, shape.heads, n, dtype=torch.float16, device=model.device) for n in lengths
        }


def collect(
    target: TracedModel, draft: TracedModel, passage: Passage, rows: int, size: ListSize, extra_step: bool = False
) -> tuple[list[Window], dict[str, torch.Tensor]]:
    """Read a passage with both models.

    Parameters
    ----------
    extra_step
        Lookahead has a row for the last verified token too.

    Returns
    -------
    tuple
        A window at each of the passage's lengths; and the retrieval masses float32 ``[layers, heads]`` of ``target``
        and ``draft`` if the passage has a needle (`needles.RetrievalMass.counted`).
    """
    lengths, drafted = passage.lengths, rows if extra_step else rows - 1
    history, lookahead = _Scores(target, lengths), _Scores(draft, lengths)
    attention = {n: torch.zeros(target.shape.layers, n, device=target.device) for n in lengths}

    def see_target(layer: Layer) -> None:
        for n in lengths:
            verified = attention_weights(layer.q[:, n : n + rows], layer.k[:, : n + rows], layer.scale, own_rows=True)
            attention[n][layer.index] = verified[:, :, :n].sum((0, 1))
            kept = attention_weights(layer.q[:, n - 1 : n], layer.k[:, :n], layer.scale)
            history.by_length[n][layer.index] = kept[:, 0].half()

    def see_draft(layer: Layer) -> None:
        for n in lengths:
            ahead = attention_weights(layer.q[:, n - 1 : n - 1 + drafted], layer.k[:, :n], layer.scale)
            # Slot j speaks for position j + 1; the last slot's token is not committed yet.
            lookahead.by_length[n][layer.index, :, 1:] = ahead.sum(1)[:, :-1].half()

    end, retrieval = max(lengths) + rows, {}
    for name, model, see, shift in (("target", target, see_target, 0), ("draft", draft, see_draft, 1)):
        ids = passage.ids[shift:end]
        if passage.needle is None:
            model.read(ids, see, [0])
        else:
            retrieval[name] = _read_needle(model, ids, see, passage.needle.shifted(-shift))
    return [_window(attention[n], lookahead, history, n, size) for n in lengths], retrieval


def _read_needle(model: TracedModel, ids: list[int], see: Callable[[Layer], None], needle: Needle) -> torch.Tensor:
    retrieval = RetrievalMass(model.shape, needle)

    def see_both(layer: Layer) -> None:
        see(layer)
        retrieval.see(layer)

    return retrieval.counted(model.read(ids, see_both, retrieval.rows), ids)


def _window(attention: torch.Tensor, lookahead: _Scores, history: _Scores, n: int, size: ListSize) -> Window:
    masses = [captured_mass(scores.by_length[n].float(), attention.sum(0), size) for scores in (lookahead, history)]
    parts = (attention, lookahead.by_length[n], history.by_length[n], *masses)
    return Window(*(part.cpu() for part in parts))
