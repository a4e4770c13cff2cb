"""Connects the parts once a launch knows both models: profile, query stores, signals, selector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin_sglang import compat, devices
from dustin_sglang.config import ConfigError, DustinConfig, groups_refused
from dustin_sglang.grouping import Grouping, count_groups
from dustin_sglang.profile import ModelShape, Profile, choose_profile
from dustin_sglang.selection.adaptive import least
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.page_bounds import PageBounds
from dustin_sglang.selection.policies import POLICIES, Budget
from dustin_sglang.selection.policies.base import SUMMED
from dustin_sglang.selection.selector import Selector
from dustin_sglang.selection.signals import Signal
from dustin_sglang.selection.state import QueryStore
from dustin_sglang.sparse_draft import SparseDraft, dense_draft_layers


@dataclass(frozen=True)
class Wiring:
    """What the worker needs each round.

    Attributes
    ----------
    grouping
        What the groups of target layers score.
    sparse_draft
        None where drafting reads everything.
    extra_step
        Whether the last drafted token looks ahead too.
    """

    selector: Selector
    target_backend: Any
    target_store: QueryStore
    profile: Profile
    grouping: Grouping
    draft_kind: str
    sparse_draft: SparseDraft | None
    extra_step: bool = False

    def describe(self, config: DustinConfig) -> str:
        """The start-up line: policy, budget, profile, draft kind, what the draft reads and what is exact."""
        budget, policy = self.selector.budget, self.selector.policy
        if policy.dense:
            reads, exact = "every position", "everything"
        else:
            fewer = "" if config.mass == 1 else f"{least(budget)} to "
            reads = (
                f"{fewer}{budget.total} positions ({budget.protected} protected, "
                + (f"{budget.lookahead} lookahead, " if budget.lookahead or budget.rest != SUMMED else "")
                + f"{budget.left} {_summed(budget) if budget.rest == SUMMED else budget.rest})"
            )
            if fewer:
                reads += f", up to {config.mass:g} of the estimated mass,"
            rest = f"the rest every {config.rectify_interval} tokens; " if config.rectify_interval else ""
            exact = f"contexts of up to {budget.total} tokens, prompts; {rest}radix {config.radix}"
        count = self.grouping.groups.count
        groups = "" if count == 1 else f" in each of {count} groups of layers"
        lookahead, history = self.profile.lookahead, _joined(self.grouping.history)
        return (
            f"dustin: policy {policy.name}, verification reads {reads}{groups}; profile {self.profile.name} (draft "
            f"layers {_span(lookahead)}, target layer {_span(history)}); draft {self.draft_kind}; drafting reads "
            f"{self._drafting()}; exact: {exact}{_monitoring(config)}"
        )

    def _drafting(self) -> str:
        further = ", one step further to look ahead" if self.extra_step else ""
        if self.sparse_draft is None:
            return f"every position{further}"
        dense = self.sparse_draft.dense_layers
        where = " but in the profile's layers" if dense else ""
        return f"the last list and the tokens since{where}{further}"


def _summed(budget: Budget) -> str:
    shares = " / ".join(f"{share:.0%}" for share in budget.shares)
    return f"by the sum of lookahead ({shares}) and history"


def _monitoring(config: DustinConfig) -> str:
    if not config.monitor_interval:
        return ""
    fallback = f", dense below an agreement of {config.dense_fallback:g}" if config.dense_fallback else ""
    return f"; monitored: one of {config.monitor_interval} sparse verifications{fallback}"


def _span(heads: Heads) -> str:
    return ",".join(str(layer) for layer in heads.layers) + f": {heads.count} heads"


def model_shape(model_config: Any) -> ModelShape:
    """Attention shape of a whole model, over all tensor-parallel ranks."""
    return ModelShape(
        layers=model_config.num_attention_layers,
        heads=model_config.num_attention_heads,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
    )


def wire(config: DustinConfig, target_runner: Any, draft_worker: Any) -> Wiring:
    """Build everything between the models and the selection; after SGLang's backends, before its graphs.

    Raises
    ------
    ProfileError
        A profile that does not fit the models.
    ConfigError
        A ``--dustin-sparse-draft`` that leaves every layer of this draft dense, or that the kernel cannot serve; groups
        of layers whose lists could not differ.
    ValueError
        A KV cache of another type than its model.
    """
    draft_runner = draft_worker.draft_runner
    for role, runner in (("target", target_runner), ("draft", draft_runner)):
        if runner.kv_cache_dtype != runner.dtype:
            raise ValueError(f"the {role}'s KV cache is {runner.kv_cache_dtype}, but the model is {runner.dtype}")
    draft, target = model_shape(draft_runner.model_config), model_shape(target_runner.model_config)
    paths = {"draft": draft_runner.model_config.model_path, "target": target_runner.model_config.model_path}
    profile = choose_profile(config.profile, draft, target, paths)
    width = draft_worker.speculative_num_draft_tokens
    draft_store = _store(
        draft_runner,
        profile.lookahead,
        pending_rows=width,
        steps=draft_worker.decode_forwards,
        branches=draft_worker.topk,
    )
    policy = POLICIES[config.policy]()
    groups = LayerGroups(target.layers, count_groups(config, paths))
    grouping = Grouping(profile, policy, groups)
    if obstacle := policy.why_not_groups(groups.count, mixed=grouping.weights is not None):
        raise groups_refused(groups.count, policy.name, obstacle)
    target_store = _store(target_runner, _joined(grouping.history), pending_rows=width)
    target_backend = target_runner.attn_backend
    target_backend.store = target_store

    # A budget beyond the context length is all of it; no list needs to be wider.
    total = min(config.budget, target_runner.model_config.context_len)
    sinks = min(config.sinks, total)
    window = min(config.window, total - sinks)
    mix = grouping.mix(draft_runner.device)
    selector = Selector(
        policy,
        grouping.budget(total, sinks, window, config.lookahead_share),
        lookahead=_signal(Signal, draft_runner, draft_store, grouping.lookahead, shift=1, mix=mix),
        history=_signal(Signal, target_runner, target_store, grouping.history, shift=0),
        pages=_signal(PageBounds, target_runner, target_store, grouping.history, shift=0),
        mass=config.mass,
    )
    sparse_draft = None
    if config.sparse_draft != "off" and not policy.dense:
        if obstacle := devices.why_not_attend(draft_runner):
            raise ConfigError(f"--dustin-sparse-draft (or DUSTIN_SPARSE_DRAFT): {obstacle}; use off")
        dense_layers = dense_draft_layers(config.sparse_draft, draft.layers, profile.lookahead.layers)
        sparse_draft = SparseDraft(dense_layers, total, width, draft_runner.req_to_token_pool.req_to_token)
    draft_worker.bind(draft_store, sparse_draft)
    kind = draft_runner.spec_algorithm.kind.value
    extra_step = draft_worker.extra_step
    return Wiring(selector, target_backend, target_store, profile, grouping, kind, sparse_draft, extra_step)


def _joined(parts: Sequence[Heads]) -> Heads:
    """All heads of parts whose layers ascend."""
    return Heads.of(place for part in parts for place in part.each)


def _store(runner: Any, heads: Heads, **kwargs: Any) -> QueryStore:
    rank, size, _ = compat.tensor_parallel(runner)
    num_heads = runner.model_config.num_attention_heads
    return QueryStore(
        heads.shard(rank, size, num_heads),
        num_heads // size,
        runner.model_config.head_dim,
        num_slots=runner.req_to_token_pool.req_to_token.shape[0],
        max_batch=compat.max_batch_size(runner),
        dtype=runner.dtype,
        device=runner.device,
        **kwargs,
    )


def _signal(
    kind: type[Signal],
    runner: Any,
    store: QueryStore,
    parts: Sequence[Heads],
    *,
    shift: int,
    mix: torch.Tensor | None = None,
) -> Signal:
    """A signal of a part of the store's heads each; `parts` are those of all ranks."""
    rank, size, reduce = compat.tensor_parallel(runner)
    model = runner.model_config
    own = [part.shard(rank, size, model.num_attention_heads) for part in parts]
    return kind(
        store,
        [runner.token_to_kv_pool.get_key_buffer(layer) for layer in store.heads.layers],
        store.heads.kv_heads(model.num_attention_heads // size, model.get_num_kv_heads(size)),
        _sm_scale(runner, store.heads),
        shift=shift,
        reduce=reduce,
        parts=store.heads.places(own),
        totals=[sum(weight for *_, weight in part.each) for part in parts],
        mix=mix,
    )


def _sm_scale(runner: Any, heads: Heads) -> float:
    """Scale of q.K in the scoring layers' own attention; some architectures do not use 1/sqrt(head_dim)."""
    from sglang.srt.layers.radix_attention import RadixAttention

    scales = {m.scaling for m in runner.model.modules() if isinstance(m, RadixAttention) and m.layer_id in heads.layers}
    if len(scales) > 1:
        raise ValueError(f"the scoring layers {heads.layers} scale attention differently ({scales}); choose others")
    return float(scales.pop()) if scales else 1.0
