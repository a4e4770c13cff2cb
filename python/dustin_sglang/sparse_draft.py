"""Sparse drafting: the draft attends to what the last selection of each request chose and to the tokens since.

The draft's KV is shifted by one: draft slot j holds token j + 1, so a listed position p is draft slot p - 1, and
position 0 has none. Of a selection made at committed length n, a draft forward reads the slots p - 1 of its positions
and every slot from n - 1 up: the tokens committed since and the forward's own. With every position listed that is
everything, which is what dense drafting reads.

Where groups of target layers have lists of their own, the draft reads the deepest group's: shallow layers attend to
both ends above all, which every list holds.

A request has a list before its first draft: its prefill leaves one, chosen by the queries that the prefill kept.

Nothing approximate is written below `exact_len` (`radix.py`). A list leaves something out only if its request was
longer than the budget at that selection. Right after a prefill, decode steps follow, whose KV the round's draft extend
replaces, and then a verification, sparse as well, which ends exactness at this same length before the draft extend
writes there. Later lists come with the verification that has ended exactness already. Rectification moves
`exact_len` to the committed length at most, and every later round writes there or beyond.
"""

from __future__ import annotations

import torch

from dustin_kernels import write_draft_lists
from dustin_sglang.config import ConfigError
from dustin_sglang.selection.selector import Selection
from dustin_sglang.slot_lists import SlotLists


class SparseDraft:
    """The lists that the draft reads, by request slot, in static buffers.

    Parameters
    ----------
    dense_layers
        Draft layers that read everything all the same.
    budget
        k, positions of a list.
    new_tokens
        Most tokens that a draft forward reads beyond the committed length of the selection: g, the tokens under
        verification, of which a round commits no more either.
    req_to_token
        int32 ``[slots, context]``, SGLang's table of KV slots.
    """

    def __init__(self, dense_layers: frozenset[int], budget: int, new_tokens: int, req_to_token: torch.Tensor) -> None:
        self.dense_layers = dense_layers
        self._width = budget + 1 + new_tokens
        self._req_to_token = req_to_token
        num_slots, device = req_to_token.shape[0], req_to_token.device
        self._lists = torch.zeros((num_slots, budget), dtype=torch.int32, device=device)
        self._counts = torch.full((num_slots,), budget, dtype=torch.int64, device=device)
        # Slot 0, which stands for the padded rows of a captured batch, keeps this length: they read the dummy KV slot.
        self._starts = torch.ones(num_slots, dtype=torch.int64, device=device)

    def keep(self, selection: Selection, slots: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Let the requests in `slots` int64 ``[batch]`` draft over `selection`, made at these committed lengths."""
        self._starts[slots] = seq_lens.long()
        if selection.positions is not None:
            self._lists[slots] = selection.positions[-1]
            if selection.kept is not None:
                self._counts[slots] = selection.kept

    def lists(
        self,
        slots: torch.Tensor,
        ends: torch.Tensor,
        own: torch.Tensor | None = None,
        into: SlotLists | None = None,
    ) -> list[SlotLists]:
        """What draft forwards read, packed, in one launch; recordable.

        Parameters
        ----------
        slots, ends
            Request slots, and one past the last committed slot to read, int64 or int32 ``[batch]``.
        own
            KV slots of the forwards' own tokens, int64 ``[batch * branches, n]``: forward i reads i + 1 of a row's.
            None for one forward, whose tokens lie below `ends` already.
        into
            The lists of that one forward are written there; None allocates.

        Returns
        -------
        list of SlotLists
            n, or one.
        """
        if own is None:
            own, forwards, first = slots.new_empty((len(slots), 0)), 1, 0
        else:
            forwards, first = own.shape[1], 1
        rows, width = len(own), self._width + own.shape[1]
        if into is None:
            kv_indptr = torch.empty((forwards, rows + 1), dtype=torch.int32, device=slots.device)
            kv_indices = torch.empty((forwards, rows * width), dtype=torch.int32, device=slots.device)
        else:
            kv_indptr, kv_indices = into.kv_indptr.unsqueeze(0), into.kv_indices.unsqueeze(0)
        write_draft_lists(
            self._lists,
            self._counts,
            self._starts,
            self._req_to_token,
            slots,
            ends,
            own,
            first,
            kv_indptr,
            kv_indices,
            max_new=self._width - self._lists.shape[1] - 1,
        )
        return [SlotLists(kv_indptr[i], kv_indices[i], self._width + first + i) for i in range(forwards)]


def dense_draft_layers(mode: str, num_layers: int, scoring: tuple[int, ...]) -> frozenset[int]:
    """Draft layers that ``--dustin-sparse-draft`` `mode` leaves dense: none for "all", the scoring ones for "unscored".

    Raises
    ------
    ConfigError
        "unscored" would leave every layer dense, as in an EAGLE head, whose one layer scores.
    """
    if mode == "all":
        return frozenset()
    if set(range(num_layers)) <= set(scoring):
        raise ConfigError(
            "--dustin-sparse-draft (or DUSTIN_SPARSE_DRAFT) is 'unscored', but every layer of this draft scores, so "
            "that none would read less; use 'all' or 'off'"
        )
    return frozenset(scoring)
