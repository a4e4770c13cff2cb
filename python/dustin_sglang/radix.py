"""The radix cache of the algorithm: KV that sparse verification computed is never shared by default.

A request's KV is exact up to `exact_len`: prefill writes exact KV, and so does a verification that reads the whole
context. The first sparse step ends it, and rectification (`rectify.py`) moves it forward. Only KV up to there may enter
the tree, and what lies beyond is freed when the request ends. `exact_len` covers the draft's KV too, since the draft's
keys choose the target's list: slots below it were written by a prefill or by a draft extend over exact hidden states.

Keys are bigrams for every kind of draft. The draft's KV at slot j holds token j + 1, so a tree keyed by single tokens
would, at the end of a match, hand one request a draft key of another request's token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, default_radix_cache_factory

from dustin_sglang import metrics
from dustin_sglang.config import DustinConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_EXACT_LEN, _FIRST, _TAG = "dustin_exact_len", "dustin_first_approximate", "dustin_approximate"


def set_exact(req: Req) -> None:
    """Everything that `req` holds is exact: it was (re-)entered as a prefill."""
    setattr(req, _EXACT_LEN, None)


def end_exact(req: Req, committed_len: int) -> None:
    """A sparse step follows at `committed_len`: what it writes is approximate. Later calls change nothing."""
    if getattr(req, _EXACT_LEN, None) is None:
        setattr(req, _EXACT_LEN, committed_len)
        setattr(req, _FIRST, committed_len)


def advance_exact(req: Req, length: int) -> None:
    """The KV of `req` below `length`, the target's and the draft's, has been rewritten densely."""
    setattr(req, _EXACT_LEN, length)


def exact_len(req: Req, committed_len: int) -> int:
    """How many of the `committed_len` tokens of `req` have exact KV."""
    exact = getattr(req, _EXACT_LEN, None)
    return committed_len if exact is None else min(exact, committed_len)


def rewritten_len(req: Req) -> int:
    """How many tokens of `req`, whose exactness has ended, have been rewritten densely since."""
    return int(getattr(req, _EXACT_LEN) - getattr(req, _FIRST))


class DustinRadixCache(RadixCache):
    """SGLang's radix cache, which takes in exact KV only.

    Parameters
    ----------
    params
        SGLang's.
    share_approximate
        ``--dustin-radix shared``: approximate KV is taken in too; its nodes are tagged.
    """

    def __init__(self, params: CacheInitParams, *, share_approximate: bool = False) -> None:
        super().__init__(dataclasses.replace(params, is_eagle=True))
        self.share_approximate = share_approximate

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Take in the exact part of a finished request and free the rest."""
        exact = exact_len(req, kv_len_to_handle)
        if self.disable or exact == kv_len_to_handle:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        elif self.share_approximate:
            self._insert_tagged(req, is_insert, exact, kv_len_to_handle)
        else:
            self._free(req, exact, kv_len_to_handle)
            super().cache_finished_req(req, is_insert, kv_len_to_handle=exact)

    def _free(self, req: Req, start: int, end: int) -> None:
        """Free the slots of positions [start, end); the page that `start` splits belongs to the exact part."""
        start = -(-start // self.page_size) * self.page_size
        if start < end:
            slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
            self.token_to_kv_pool_allocator.free_segment(slots, start_pos=start)

    # -- --dustin-radix shared -----------------------------------------------------------------------------------

    def _insert_tagged(self, req: Req, is_insert: bool, exact: int, committed: int) -> None:
        """Take in the whole request, then tag where its approximate part starts.

        Only what this request adds is tagged: what the tree already held keeps the tag it has.
        """
        tokens = (req.origin_input_ids + req.output_ids)[:committed]
        key = RadixKey(tokens, req.extra_key, is_bigram=True).page_aligned(self.page_size)
        held = len(self.match_prefix(MatchPrefixParams(key=key)).device_indices)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=committed)
        start = max(held, exact // self.page_size * self.page_size)
        if not is_insert or start >= len(key):
            return
        # Matching up to `start` splits a node that spans it.
        node = self.match_prefix(MatchPrefixParams(key=key[:start])).last_device_node if start else self.root_node
        child = node.children[key[start:].child_key(self.page_size)]
        setattr(child, _TAG, True)
        metrics.get().radix_approximate_tokens(len(key) - start)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if getattr(child, _TAG, False):
            setattr(upper, _TAG, True)
        return upper

    def approximate_size(self) -> int:
        """Tokens of the tree at or below a tagged node: what follows approximate KV was computed over it."""
        total, stack = 0, [(self.root_node, False)]
        while stack:
            node, approximate = stack.pop()
            approximate = approximate or getattr(node, _TAG, False)
            total += len(node.value) if approximate else 0
            stack += [(child, approximate) for child in node.children.values()]
        return total


def create_dustin_radix_cache(ctx: TreeCacheBuildContext) -> Any:
    """Factory for ``--radix-cache-backend dustin``; without a radix cache, SGLang's own choice."""
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    return DustinRadixCache(ctx.params, share_approximate=DustinConfig.from_env().radix == "shared")
