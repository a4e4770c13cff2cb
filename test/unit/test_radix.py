"""What of a finished request enters the radix tree, and that every slot is either there or freed, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from dustin_sglang.radix import DustinRadixCache, end_exact, exact_len, set_exact


class Allocator:
    """Records what is freed; splits segments as SGLang's own does."""

    device = "cpu"
    free_segments = BaseTokenToKVPoolAllocator.free_segments

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.freed: list[int] = []

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        pages = dict.fromkeys((slots // self.page_size).tolist())
        for page in pages:
            self.freed += range(page * self.page_size, (page + 1) * self.page_size)


def cache(page_size: int, **kwargs: Any) -> DustinRadixCache:
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32), write=None)
    pool.write = lambda index, value: pool.req_to_token.__setitem__(index, value.int())
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=Allocator(page_size),
        page_size=page_size,
        is_eagle=False,
    )
    return DustinRadixCache(params, **kwargs)


def request(tree: DustinRadixCache, row: int, prompt: list[int], output: list[int], first_slot: int) -> Any:
    tree.req_to_token_pool.req_to_token[row, :48] = torch.arange(first_slot, first_slot + 48, dtype=torch.int32)
    req = SimpleNamespace(
        origin_input_ids=prompt,
        output_ids=output,
        req_pool_idx=row,
        extra_key=None,
        cache_protected_len=0,
        last_node=tree.root_node,
        priority=0,
    )
    req.get_fill_ids = lambda: prompt
    set_exact(req)
    return req


def held(tree: DustinRadixCache, tokens: list[int]) -> int:
    return len(tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None))).device_indices)


PROMPT, OUTPUT = list(range(100, 112)), list(range(200, 213))  # 12 + 13 tokens, 25 committed at most


def test_exact_len_is_everything_until_the_first_sparse_step() -> None:
    req: Any = SimpleNamespace()
    set_exact(req)
    assert exact_len(req, 40) == 40
    end_exact(req, 20)
    end_exact(req, 30)  # the first one counts
    assert exact_len(req, 40) == 20 and exact_len(req, 10) == 10
    set_exact(req)  # retracted and prefilled again
    assert exact_len(req, 40) == 40


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("exact", [None, 12, 13, 16, 24])
def test_every_slot_is_in_the_tree_or_freed_once(page_size: int, exact: int | None) -> None:
    tree = cache(page_size)
    req = request(tree, 1, PROMPT, OUTPUT, 64)
    tree.cache_unfinished_req(req)
    if exact is not None:
        end_exact(req, exact)
    committed = 24
    tree.cache_finished_req(req, kv_len_to_handle=committed)
    freed = tree.token_to_kv_pool_allocator.freed
    kept = sorted(tree.all_values_flatten().tolist()) if tree.total_size() else []
    assert len(freed) == len(set(freed)) and not set(freed) & set(kept)
    pages_end = -(-committed // page_size) * page_size
    assert sorted([*freed, *kept]) == list(range(64, 64 + pages_end))
    # Bigram keys: of n exact tokens n - 1 are kept, in whole pages.
    limit = committed if exact is None else exact
    assert len(kept) == (limit - 1) // page_size * page_size
    assert held(tree, PROMPT + OUTPUT) == len(kept)
    assert tree.protected_size() == 0


def test_nothing_approximate_is_inserted_when_a_request_is_aborted() -> None:
    tree = cache(1)
    req = request(tree, 1, PROMPT, OUTPUT, 64)
    tree.cache_unfinished_req(req)
    end_exact(req, 12)
    tree.cache_finished_req(req, is_insert=False, kv_len_to_handle=20)
    assert held(tree, PROMPT + OUTPUT) == 11
    assert sorted(tree.token_to_kv_pool_allocator.freed) == list(range(64 + 11, 64 + 20))


def test_keys_are_bigrams_whatever_the_draft() -> None:
    """The draft's KV of the last matched slot holds the next token, so a match must cover that token too."""
    tree = cache(1)
    req = request(tree, 1, PROMPT, [], 64)
    tree.cache_unfinished_req(req)
    assert held(tree, PROMPT[:8] + [999, 998]) == 7


def test_shared_mode_inserts_and_tags_what_is_approximate() -> None:
    tree = cache(1, share_approximate=True)
    req = request(tree, 1, PROMPT, OUTPUT, 64)
    tree.cache_unfinished_req(req)
    end_exact(req, 14)
    tree.cache_finished_req(req, kv_len_to_handle=24)
    assert held(tree, PROMPT + OUTPUT) == 23
    assert tree.approximate_size() == 23 - 14
    # Splitting the tagged node keeps both halves tagged.
    assert held(tree, (PROMPT + OUTPUT)[:19] + [999]) == 18
    assert tree.approximate_size() == 23 - 14


def test_shared_mode_does_not_tag_what_was_exact_before() -> None:
    tree = cache(1, share_approximate=True)
    first = request(tree, 1, PROMPT + OUTPUT[:4], [], 64)
    tree.cache_unfinished_req(first)
    second = request(tree, 2, PROMPT, OUTPUT, 128)
    tree.cache_unfinished_req(second)
    end_exact(second, 12)
    tree.cache_finished_req(second, kv_len_to_handle=24)
    assert tree.approximate_size() == 23 - 15  # 15 positions were there, exact, from the first request
