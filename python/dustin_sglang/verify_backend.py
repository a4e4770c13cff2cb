"""Verification over the selected slots: what every target backend on a GPU shares, and the one on FlashInfer.

The list of a request and group of layers is its selected positions followed by the slots of the g tokens under
verification, at page size 1 whatever SGLang's is. A chain needs no mask: attention is causal at the end of the list. A
tree needs the g x g mask of the draft tokens, every listed position being visible to all rows.

FlashInfer plans from counts, which the host knows and all groups share: planning never waits for the device, and is
repeated only when a count changes. `attend_backend.py` needs no plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from sglang.srt.layers.attention.flashinfer_backend import PrefillMetadata, fast_prefill_plan
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from dustin_kernels import pack_tree_mask, write_slots
from dustin_sglang.rewriting import RewritingBackend, indptr
from dustin_sglang.tap import ExtendTap

if TYPE_CHECKING:
    from dustin_sglang.selection.layer_groups import LayerGroups
    from dustin_sglang.selection.selector import Selection


class ListedBackend(RewritingBackend):
    """The target's attention: SGLang's FlashInfer backend, except that verification reads lists.

    Parameters
    ----------
    model_runner
        The target's runner.
    groups
        Layers that share a list.
    list_width
        Most positions listed a request: k, or whatever a request can hold for the dense policy.
    topk, num_draft_tokens
        Branches of the draft tree and g, the tokens under verification.
    """

    needs_cpu_seq_lens = False  # before a round: a verification gets them from the worker

    def __init__(
        self,
        model_runner: Any,
        *,
        groups: LayerGroups,
        list_width: int,
        topk: int,
        num_draft_tokens: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_runner, **kwargs)
        self._groups = groups
        self._list_width, self._is_tree, self._g = list_width, topk > 1, num_draft_tokens
        self._selection: Selection | None = None
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        self._device = model_runner.device
        self._max_bs = self.kv_last_page_len.shape[0]
        cells = self._max_bs * self._g * self._g
        self._verify_mask = VerifyMask(
            buffer=torch.zeros(cells, dtype=torch.bool, device=self._device),
            mode=TreeMaskMode.QLEN_ONLY,
            max_bs=self._max_bs,
            is_read=self._is_tree,
        )

    def attend_to(self, selection: Selection) -> None:
        """Let the next verification read `selection`."""
        self._selection = selection

    @property
    def verify_mask(self) -> VerifyMask:
        """The g x g tree mask that the draft fills; its prefix part is never built."""
        return self._verify_mask

    def _counts(self, forward_batch: Any, in_capture: bool) -> list[int]:
        """Listed positions a request; capture and the padding of a captured batch list one."""
        if in_capture:
            return [1] * forward_batch.batch_size
        if self._selection is None:
            raise RuntimeError("a verification was planned before its positions were selected")
        counts = self._selection.counts
        return counts + [1] * (forward_batch.batch_size - len(counts))

    def _write_lists(
        self, forward_batch: Any, counts: list[int], kv_indptr: torch.Tensor, kv_indices: list[torch.Tensor]
    ) -> None:
        """Write where every request's list starts, int32 ``[batch + 1]``, and each group's slots; on the device."""
        selection = self._selection
        positions = None if selection is None else selection.positions
        bs = len(counts)
        committed = forward_batch.seq_lens[:bs]
        seq_lens, whole = committed, []
        if positions is not None:
            width = positions.shape[2]
            whole = [row for row, n in enumerate(counts) if n > width]
            seq_lens = committed.clamp(max=width)
            padding = bs - positions.shape[1]
            if selection is not None and selection.kept is not None:
                seq_lens = torch.nn.functional.pad(selection.kept, (0, padding), value=1)
            if padding:  # padded rows list position 0
                positions = torch.nn.functional.pad(positions, (0, 0, 0, padding))
            for row in whole:
                seq_lens[row : row + 1].copy_(committed[row : row + 1])
        kv_indptr[:1].zero_()
        torch.cumsum(seq_lens + self._g, dim=0, dtype=torch.int32, out=kv_indptr[1:])
        slots = forward_batch.req_pool_indices[:bs]
        table, g = self._req_to_token, self._g
        for group, indices in enumerate(kv_indices):
            listed = None if positions is None else positions[group]
            write_slots(listed, committed, slots, table, kv_indptr, g, indices, max_len=max(counts))
            for row in whole:  # over the list that stands there
                one, span = slice(row, row + 1), kv_indptr[row : row + 2]
                write_slots(None, committed[one], slots[one], table, span, g, indices, max_len=counts[row])

    def _tree(self, forward_batch: Any, bs: int) -> torch.Tensor:
        """Mask among the draft tokens, bool ``[bs * g * g]``."""
        tree = forward_batch.spec_info.custom_mask
        cells = bs * self._g * self._g
        if tree is None or tree.numel() < cells:  # capture runs before any draft has filled the mask
            return torch.ones(cells, dtype=torch.bool, device=self._device)
        return tree[:cells]


class FlashInferListedBackend(ListedBackend):
    """Verification by FlashInfer's paged prefill."""

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        self._planned: dict[int, list[int]] = {}
        self._lists: list[torch.Tensor] = []  # index buffers of the verification to come, a group each
        self._qo_indptr_host = torch.arange(self._max_bs + 1, dtype=torch.int32) * self._g
        self._verify_qo_indptr = self._qo_indptr_host.to(self._device)

    # -- CUDA graphs ---------------------------------------------------------------------------------------------

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        """Allocate the buffers that captured verifications read."""
        shape = (self._groups.count, max_bs * (self._list_width + self._g))
        self._graph_indices = list(torch.zeros(shape, dtype=torch.int32, device=self._device))
        self.cuda_graph_kv_indices = self._graph_indices[:1]
        self.cuda_graph_swa_out_cache_loc = None
        self.cuda_graph_qo_indptr = [self._verify_qo_indptr.clone()]
        self.cuda_graph_qk_indptr = [torch.zeros(max_bs + 1, dtype=torch.int32, device=self._device)]
        mask_bytes = self._mask_bytes(self._list_width + self._g) * max_bs if self._is_tree else 0
        self.cuda_graph_custom_mask = torch.zeros(mask_bytes, dtype=torch.uint8, device=self._device)

    def _prepare_cuda_graph_metadata(self, bs: int, num_tokens: int, forward_mode: Any, spec_info: Any) -> None:
        if not forward_mode.is_target_verify():
            super()._prepare_cuda_graph_metadata(bs, num_tokens, forward_mode, spec_info)
            return
        wrappers = self._create_prefill_wrappers(bs, use_custom_mask=self._is_tree)
        self.prefill_cuda_graph_metadata[bs] = wrappers
        self.forward_metadata = PrefillMetadata(wrappers, False, False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a captured verification and write its slots; other modes as FlashInfer."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        bs = forward_batch.batch_size
        if in_capture:
            self._prepare_cuda_graph_metadata(bs, bs * self._g, forward_batch.forward_mode, forward_batch.spec_info)
        wrapper = self.prefill_cuda_graph_metadata[bs][0]
        counts = self._counts(forward_batch, in_capture)
        kv_indptr = wrapper._paged_kv_indptr_buf
        self._write_lists(forward_batch, counts, kv_indptr, self._graph_indices)
        if self._is_tree:
            self._write_mask(forward_batch, counts, kv_indptr, wrapper._custom_mask_buf, wrapper._mask_indptr_buf)
        if in_capture or self._planned.get(bs) != counts:
            self._plan_captured(wrapper, bs, counts, kv_indptr, first=in_capture)
            self._planned[bs] = counts
        self._lists = self._graph_indices

    def _plan_captured(self, wrapper: Any, bs: int, counts: list[int], kv_indptr: torch.Tensor, *, first: bool) -> None:
        if first:
            self._plan(wrapper, bs, counts, self._graph_indices[0][: sum(counts) + bs * self._g])
            return
        lens = torch.tensor(counts, dtype=torch.int32) + self._g
        fast_prefill_plan(
            wrapper,
            self._verify_qo_indptr[: bs + 1],
            kv_indptr,
            self._graph_indices[0][:0],
            self.kv_last_page_len[:bs],
            self.indices_updater_prefill.num_qo_heads,
            self.indices_updater_prefill.num_kv_heads,
            self.indices_updater_prefill.head_dim,
            1,
            causal=not self._is_tree,
            q_data_type=self.indices_updater_prefill.q_data_type,
            kv_data_type=self.indices_updater_prefill.data_type,
            qo_indptr_host=self._qo_indptr_host[: bs + 1],
            kv_indptr_host=indptr(lens),
            kv_lens_host=lens,
            max_q_len=self._g,
            max_kv_len=int(lens.max()),
        )

    # -- eager ---------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager verification and write its slots; other modes as FlashInfer."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
            return
        bs = forward_batch.batch_size
        counts = self._counts(forward_batch, in_capture=False)
        total = sum(counts) + bs * self._g
        self._lists = list(torch.empty((self._groups.count, total), dtype=torch.int32, device=self._device))
        kv_indptr = torch.empty(bs + 1, dtype=torch.int32, device=self._device)
        self._write_lists(forward_batch, counts, kv_indptr, self._lists)
        wrapper = self.prefill_wrappers_verify[0]
        self._plan(wrapper, bs, counts, self._lists[0])
        if self._is_tree:
            size = sum(self._mask_bytes(n + self._g) for n in counts)
            # Set on the wrapper: given to plan(), a packed mask would get offsets in bits instead of bytes.
            wrapper._custom_mask_buf = torch.empty(size, dtype=torch.uint8, device=self._device)
            wrapper._mask_indptr_buf = torch.empty_like(kv_indptr)
            self._write_mask(forward_batch, counts, kv_indptr, wrapper._custom_mask_buf, wrapper._mask_indptr_buf)
        self.forward_metadata = PrefillMetadata([wrapper], False, False)

    # -- both ----------------------------------------------------------------------------------------------------

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend: one plan serves all groups of layers, each with its own index buffer."""
        if forward_batch.forward_mode.is_target_verify():
            (wrapper,) = self.forward_metadata.prefill_wrappers
            wrapper._paged_kv_indices_buf = self._lists[self._groups.of(layer.layer_id)]
        out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return out

    def _write_mask(
        self,
        forward_batch: Any,
        counts: list[int],
        kv_indptr: torch.Tensor,
        out: torch.Tensor,
        mask_indptr: torch.Tensor,
    ) -> None:
        """Pack the tree masks of a batch into `out`, the byte offset of each request into `mask_indptr`."""
        kv_lens = kv_indptr[1:] - kv_indptr[:-1]
        mask_indptr[0] = 0
        torch.cumsum((kv_lens * self._g + 7) // 8, dim=0, dtype=torch.int32, out=mask_indptr[1:])
        tree = self._tree(forward_batch, len(counts))
        pack_tree_mask(tree, kv_indptr, mask_indptr, self._g, out, max_kv_len=max(counts) + self._g)

    def _mask_bytes(self, kv_len: int) -> int:
        return (kv_len * self._g + 7) // 8

    def _plan(
        self, wrapper: BatchPrefillWithPagedKVCacheWrapper, bs: int, counts: list[int], kv_indices: torch.Tensor
    ) -> None:
        updater = self.indices_updater_prefill
        lens = torch.tensor(counts, dtype=torch.int32) + self._g
        wrapper.begin_forward(  # index pointers on the host: FlashInfer then copies nothing back
            self._qo_indptr_host[: bs + 1],
            indptr(lens),
            kv_indices,
            torch.ones(bs, dtype=torch.int32),
            updater.num_qo_heads,
            updater.num_kv_heads,
            updater.head_dim,
            1,
            causal=not self._is_tree,
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
            non_blocking=True,
        )


class DustinFlashInferBackend(ExtendTap, FlashInferListedBackend):
    """The target's backend for ``--dustin-attention flashinfer``."""
