"""The CPU attention backends against attention computed row by row, from slots worked out independently."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    pytest.skip("needs SGLang's CPU engine", allow_module_level=True)
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from dustin_sglang.cpu import install, segments
from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.cpu.draft_attention import CpuMultiStepDraftBackend

KV_HEADS, HEAD_DIM, SCALE = 2, 8, 0.3
MAX_REQUESTS, MAX_LEN = 5, 128
TREE = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


class Pool:
    """One layer's KV pool, filled with random rows."""

    k: torch.Tensor
    v: torch.Tensor

    def __init__(self, slots: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.k, self.v = torch.randn(2, slots, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)

    def set_kv_buffer(self, layer: RadixAttention, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[where.loc], self.v[where.loc] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


@dataclass
class World:
    """A fake model runner whose requests own random, page-aligned slots."""

    page_size: int = 1
    group: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0
    generator: torch.Generator = field(init=False)
    table: torch.Tensor = field(init=False)
    layer: RadixAttention = field(init=False)
    runner: Any = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        pages = torch.randperm(MAX_REQUESTS * MAX_LEN // self.page_size, generator=self.generator)
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        self.table = slots.reshape(MAX_REQUESTS, MAX_LEN).int()
        self.layer = RadixAttention(KV_HEADS * self.group, HEAD_DIM, SCALE, KV_HEADS, layer_id=0)
        self.runner = SimpleNamespace(
            model=torch.nn.ModuleList([self.layer]),
            model_config=SimpleNamespace(is_encoder_decoder=False, context_len=MAX_LEN),
            server_args=SimpleNamespace(enable_torch_compile=False),
            use_mla_backend=False,
            dtype=self.dtype,
            kv_cache_dtype=self.dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=Pool(MAX_REQUESTS * MAX_LEN, self.dtype, self.generator),
        )

    def qkv(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query ``[rows, heads * dim]`` (a strided part of a wider one, as models make it), keys and values."""
        heads = KV_HEADS * self.group
        q = torch.randn(rows, 2 * heads * HEAD_DIM, generator=self.generator).to(self.dtype)[:, : heads * HEAD_DIM]
        k, v = torch.randn(2, rows, KV_HEADS, HEAD_DIM, generator=self.generator).to(self.dtype)
        return q, k, v

    def expect(self, out: torch.Tensor, q: torch.Tensor, visible: list[torch.Tensor]) -> None:
        """Compare with attention of each row over the slots it may see, in float64 from the pool as it is now."""
        pool = self.runner.token_to_kv_pool
        heads = KV_HEADS * self.group
        want = torch.empty(q.shape[0], heads, HEAD_DIM, dtype=torch.float64)
        for row, slots in enumerate(visible):
            for head in range(heads):
                k, v = (cache[slots.long(), head // self.group].double() for cache in (pool.k, pool.v))
                query = q[row, head * HEAD_DIM : (head + 1) * HEAD_DIM].double()
                want[row, head] = (k @ query * SCALE).softmax(0) @ v
        tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), want.flatten(1), rtol=tolerance, atol=tolerance)


def batch(mode: ForwardMode, rows: list[int], seq_lens: list[int], slots: list[torch.Tensor], **more: Any) -> Any:
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
        out_cache_loc=torch.cat(slots).long(),
        **more,
    )


def run(world: World, backend: CpuAttnBackend, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and query of a batch with random inputs; also checks that its K and V were stored."""
    q, k, v = world.qkv(forward_batch.out_cache_loc.numel())
    out = backend.forward(q, k, v, world.layer, forward_batch)
    assert torch.equal(world.runner.token_to_kv_pool.k[forward_batch.out_cache_loc], k)
    assert torch.equal(world.runner.token_to_kv_pool.v[forward_batch.out_cache_loc], v)
    assert out.dtype == world.dtype
    return out, q


def extend(world: World, requests: list[tuple[int, int]], mode: ForwardMode = ForwardMode.EXTEND) -> None:
    """Run requests of (prefix, new) tokens and check every row."""
    rows = torch.randperm(MAX_REQUESTS, generator=world.generator)[: len(requests)].tolist()
    written = [world.table[r, p : p + n] for r, (p, n) in zip(rows, requests, strict=True)]
    new = torch.tensor([n for _, n in requests])
    forward_batch = batch(mode, rows, [p + n for p, n in requests], written, extend_seq_lens=new)
    backend = CpuAttnBackend(world.runner)
    backend.init_forward_metadata(forward_batch)
    out, q = run(world, backend, forward_batch)
    visible = [world.table[r, : p + i + 1] for r, (p, n) in zip(rows, requests, strict=True) for i in range(n)]
    world.expect(out, q, visible)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=MAX_REQUESTS),
    page_size=st.sampled_from([1, 16]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_prefill(requests: list[tuple[int, int]], page_size: int, group: int, seed: int) -> None:
    """With and without a prefix, in one block of rows and in several, folded and not."""
    with patch.object(segments, "BLOCK_ROWS", 8), patch.object(segments, "FOLD_ROWS", 4):
        extend(World(page_size, group, seed=seed), requests)


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2])
def test_other_modes_that_extend(mode: ForwardMode) -> None:
    extend(World(), [(9, 4), (30, 4), (0, 4)], mode)


@pytest.mark.parametrize("requests", [[(0, 60)], [(20, 60), (3, 5)]])
def test_prefill_in_bfloat16(requests: list[tuple[int, int]]) -> None:
    extend(World(dtype=torch.bfloat16), requests)


def test_masks_are_cut_from_the_largest_one() -> None:
    mask = segments.CausalMask(3, 5, torch.float32)
    hidden = float("-inf")
    assert mask.view(3, 5).tolist() == [[0, 0, 0, hidden, hidden], [0, 0, 0, 0, hidden], [0, 0, 0, 0, 0]]
    assert mask.view(2, 3).tolist() == [[0, 0, hidden], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode(page_size: int, dtype: torch.dtype) -> None:
    world = World(page_size, group=3, dtype=dtype)
    rows, seq_lens = [3, 0, 2], [1, 50, 17]
    last = [world.table[r, n - 1 : n] for r, n in zip(rows, seq_lens, strict=True)]
    forward_batch = batch(ForwardMode.DECODE, rows, seq_lens, last)
    backend = CpuAttnBackend(world.runner)
    backend.init_forward_metadata(forward_batch)
    out, q = run(world, backend, forward_batch)
    world.expect(out, q, [world.table[r, :n] for r, n in zip(rows, seq_lens, strict=True)])


class SparseBackend(CpuAttnBackend):
    """Verification reads the positions that a test chose."""

    positions: tuple[list[int], ...] = ()

    def _verify_segments(self, forward_batch: Any, contexts: list[torch.Tensor]) -> list[Any]:
        listed = [own[p] for own, p in zip(contexts, self.positions, strict=True)]
        return super()._verify_segments(forward_batch, listed)


def verify_batch(world: World, rows: list[int], contexts: list[int], g: int, mask: torch.Tensor | None) -> Any:
    drafts = [world.table[r, n : n + g] for r, n in zip(rows, contexts, strict=True)]
    spec_info = SimpleNamespace(draft_token_num=g, custom_mask=mask)
    return batch(ForwardMode.TARGET_VERIFY, rows, contexts, drafts, spec_info=spec_info)


@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sparse", [False, True])
def test_verification(page_size: int, tree: list[list[int]] | None, sparse: bool) -> None:
    """Chain and tree, over the whole context and over a part of it that differs in size between requests."""
    world = World(page_size)
    rows, contexts, g = [4, 1], [33, 6], 5
    read = ([0, 1, 7, 30, 32], [2, 5]) if sparse else tuple(list(range(n)) for n in contexts)
    sees = torch.tensor(tree) if tree else torch.ones(g, g, dtype=torch.int64).tril()
    # The second request's tree is a chain, so that taking the first mask for both shows.
    masks = torch.stack([sees, torch.ones(g, g, dtype=torch.int64).tril()]).bool()
    forward_batch = verify_batch(world, rows, contexts, g, masks.flatten() if tree else None)
    backend: Any = SparseBackend(world.runner) if sparse else CpuAttnBackend(world.runner)
    backend.positions = read
    backend.init_forward_metadata(forward_batch)
    out, q = run(world, backend, forward_batch)
    visible = []
    for request, (row, n) in enumerate(zip(rows, contexts, strict=True)):
        for draft in range(g):
            own = n + masks[request, draft].nonzero()[:, 0]
            visible.append(world.table[row, torch.cat([torch.tensor(read[request]), own])])
    world.expect(out, q, visible)


@pytest.mark.parametrize("tree", [None, TREE])
def test_a_full_list_gives_the_bits_of_dense_verification(tree: list[list[int]] | None) -> None:
    rows, contexts, g = [4, 1], [33, 6], 5
    mask = torch.tensor([tree, tree]).bool().flatten() if tree else None
    outputs = []
    for kind in (CpuAttnBackend, SparseBackend):
        world = World()
        backend: Any = kind(world.runner)
        backend.positions = tuple(list(range(n)) for n in contexts)
        forward_batch = verify_batch(world, rows, contexts, g, mask)
        backend.init_forward_metadata(forward_batch)
        outputs.append(run(world, backend, forward_batch)[0])
    assert torch.equal(*outputs)


def test_a_mask_over_the_context_is_refused() -> None:
    world = World()
    forward_batch = verify_batch(world, [0], [6], 4, torch.ones(4 * (6 + 4), dtype=torch.bool))
    with pytest.raises(ValueError, match="QLEN_ONLY"):
        CpuAttnBackend(world.runner).init_forward_metadata(forward_batch)


def draft_positions(seq_len: int, topk: int, steps: int, page_size: int) -> torch.Tensor:
    """Positions that a branch writes, int64 ``[topk, steps]``: SGLang's layout, in whole pages a branch for trees."""
    branches = torch.arange(topk)[:, None]
    if page_size == 1 or topk == 1:
        return seq_len + branches * steps + torch.arange(steps)
    tail = seq_len % page_size
    pages = -(-(tail + steps) // page_size)
    return seq_len + branches * pages * page_size + torch.arange(steps)


@pytest.mark.parametrize("topk, page_size", [(1, 1), (1, 16), (3, 1), (3, 16)])
def test_drafting_sees_the_context_and_its_own_branch(topk: int, page_size: int) -> None:
    world = World(page_size)
    rows, contexts, steps = [2, 4], [21, 5], 4
    positions = [draft_positions(n, topk, steps, page_size) for n in contexts]
    drafts = [world.table[r][p] for r, p in zip(rows, positions, strict=True)]
    forward_batch = batch(ForwardMode.DECODE, rows, contexts, [d.flatten() for d in drafts])
    container = CpuMultiStepDraftBackend(world.runner, topk, steps)
    container.init_forward_metadata(forward_batch)
    assert len(container.attn_backends) == steps - 1
    for step, backend in enumerate(container.attn_backends):
        forward_batch.out_cache_loc = torch.cat([d[:, step] for d in drafts]).long()
        out, q = run(world, backend, forward_batch)
        visible = [
            torch.cat([world.table[r, :n], own[branch, : step + 1]])
            for r, n, own in zip(rows, contexts, drafts, strict=True)
            for branch in range(topk)
        ]
        world.expect(out, q, visible)


def test_an_idle_batch_has_no_rows() -> None:
    world = World()
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    container = CpuMultiStepDraftBackend(world.runner, 2, 3)
    container.init_forward_metadata(idle)
    for backend in (CpuAttnBackend(world.runner), *container.attn_backends):
        backend.init_forward_metadata(idle)
        q = torch.empty(0, 2 * KV_HEADS * HEAD_DIM)
        assert backend.forward(q, None, None, world.layer, idle).shape == q.shape


def test_a_batch_that_was_not_prepared_is_an_error() -> None:
    world = World()
    backend = CpuAttnBackend(world.runner)
    forward_batch = batch(ForwardMode.DECODE, [0, 1], [3, 4], [world.table[:2, 3]])
    with pytest.raises(RuntimeError, match="2 query rows do not match"):
        backend.forward(*world.qkv(2), world.layer, forward_batch)


def test_unknown_arguments_and_modes_are_refused() -> None:
    world = World()
    backend = CpuAttnBackend(world.runner)
    forward_batch = batch(ForwardMode.DECODE, [0], [3], [world.table[0, 2:3]])
    backend.init_forward_metadata(forward_batch)
    backend.forward(*world.qkv(1), world.layer, forward_batch, sinks=None)
    with pytest.raises(NotImplementedError, match="sinks"):
        backend.forward(*world.qkv(1), world.layer, forward_batch, sinks=torch.zeros(2))
    forward_batch.forward_mode = ForwardMode.SPLIT_PREFILL
    with pytest.raises(NotImplementedError, match="SPLIT_PREFILL"):
        backend.init_forward_metadata(forward_batch)


@pytest.mark.parametrize(
    "where, name, value, message",
    [
        ("layer", "logit_cap", 30.0, r"logit soft caps \(layer 0\)"),
        ("layer", "sliding_window_size", 128, "sliding windows"),
        ("layer", "is_cross_attention", True, "cross attention"),
        ("layer", "attn_type", AttentionType.ENCODER_ONLY, "encoder_only attention"),
        ("layer", "attn_type", AttentionType.DECODER_BIDIRECTIONAL, "decoder_bidirectional attention"),
        ("layer", "xai_temperature_len", 512, "temperature scaling"),
        ("runner", "use_mla_backend", True, "latent attention"),
        ("runner", "kv_cache_dtype", torch.float8_e4m3fn, "KV cache of torch.float8_e4m3fn"),
        ("runner.model_config", "is_encoder_decoder", True, "encoder-decoder"),
        ("runner.server_args", "enable_torch_compile", True, "--enable-torch-compile"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start_up(where: str, name: str, value: Any, message: str) -> None:
    world = World()
    owner: Any = world
    for part in where.split("."):
        owner = getattr(owner, part)
    setattr(owner, name, value)
    with pytest.raises(NotImplementedError, match=message):
        CpuAttnBackend(world.runner)


def factory(name: str, steps: int = 3) -> DraftBackendFactory:
    server_args = SimpleNamespace(
        attention_backend=name,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_draft_attention_backend=None,
    )
    runner = World().runner
    runner.model_config.hf_config = SimpleNamespace()
    return DraftBackendFactory(server_args, runner, topk=2, speculative_num_steps=steps)


def test_installing_takes_one_name_and_each_hook_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a registry of the test's own: a plugin may have installed the backends for the whole session."""
    registry, hooks = {"torch_native": "stock", "flashinfer": "stock"}, []
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", registry)
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: hooks.append((target, kind)))
    monkeypatch.setattr(install, "_installed", False)
    install.install()
    install.install()
    assert registry == {"torch_native": install.create_backend, "flashinfer": "stock"}
    factory_name = f"{DraftBackendFactory.__module__}.DraftBackendFactory"
    assert hooks == [
        (f"{factory_name}.create_decode_backend", HookType.AROUND),
        (f"{factory_name}.create_draft_extend_backend", HookType.AROUND),
        ("sglang.srt.speculative.eagle_utils.eagle_sample", HookType.AROUND),
        ("sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask", HookType.REPLACE),
        ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", HookType.AROUND),
    ]
    assert isinstance(install.create_backend(World().runner), CpuAttnBackend)


def test_installing_serves_drafting_for_torch_native_only() -> None:
    install.install()
    HookRegistry.apply_hooks()
    backend = factory("torch_native").create_decode_backend()
    assert isinstance(backend, CpuMultiStepDraftBackend) and len(backend.attn_backends) == 2
    assert factory("torch_native", steps=1).create_decode_backend() is None
    # SGLang's own refusal: our hook passes other names on.
    with pytest.raises(ValueError, match="not supported in decode attention backend flex_attention"):
        factory("flex_attention").create_decode_backend()
    chosen = factory("flex_attention")
    chosen.server_args.speculative_draft_attention_backend = "torch_native"
    assert isinstance(chosen.create_decode_backend(), CpuMultiStepDraftBackend)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_installing_serves_draft_extend(mode: str) -> None:
    install.install()
    HookRegistry.apply_hooks()
    with patch("sglang.srt.runtime_context.get_spec", lambda: SimpleNamespace(speculative_attention_mode=mode)):
        assert isinstance(factory("torch_native").create_draft_extend_backend(), CpuAttnBackend)
        chosen = factory("flex_attention")
        setattr(chosen.server_args, f"{mode}_attention_backend", "torch_native")
        assert isinstance(chosen.create_draft_extend_backend(), CpuAttnBackend)
