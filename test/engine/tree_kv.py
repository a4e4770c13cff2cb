"""What the radix tree holds, and what a fresh prefill would have written there."""

from __future__ import annotations

from typing import Any

import torch
from scheduler_harness import Engine

# Token ids of a path from the root, one more than its slots, and the slots' K and V by model.
Paths = dict[tuple[int, ...], dict[str, torch.Tensor]]


def slot_kv(engine: Engine, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """K and V of all layers, float32 ``[2 * layers, slots, heads, head_dim]``, by model."""
    result = {}
    for role, runner in (("target", engine.target), ("draft", engine.worker._draft_worker.draft_runner)):
        pool, layers = runner.token_to_kv_pool, range(runner.model_config.num_hidden_layers)
        parts = [get(layer)[slots] for layer in layers for get in (pool.get_key_buffer, pool.get_value_buffer)]
        result[role] = torch.stack(parts)
    return result


def tree_kv(engine: Engine) -> Paths:
    """KV along every path of the tree that ends in a leaf."""
    found: Paths = {}
    stack: list[tuple[Any, tuple[int, ...], list[torch.Tensor]]] = [(engine.tree.root_node, (), [])]
    while stack:
        node, ids, slots = stack.pop()
        if not node.children and slots:
            found[ids] = slot_kv(engine, torch.cat(slots))
        for child in node.children.values():
            # Keys are bigrams: n of them have n + 1 tokens, and a child's first token is its parent's last.
            own = tuple(child.key.raw_token_ids())
            stack.append((child, ids + own[bool(ids) :], [*slots, child.value]))
    return found


def drive(engine: Engine, seen: Paths, steps: int | None = None) -> None:
    """Run `steps` batches, or all that is left, and remember what the tree held after each."""
    done = 0
    while engine.busy and done != steps:
        engine.step()
        seen.update(tree_kv(engine))
        done += 1


def worst_difference(engine: Engine, seen: Paths) -> dict[str, float]:
    """Prefill each path of `seen` anew, whole and alone; largest absolute difference of any K or V, by model."""
    engine.scheduler.chunked_prefill_size = None
    worst = dict.fromkeys(("target", "draft"), 0.0)
    for i, (ids, held) in enumerate(seen.items()):
        assert engine.scheduler.flush_cache()
        engine.generate({f"fresh {i}": list(ids)}, 1)
        fresh = tree_kv(engine)[ids]
        for role, values in held.items():
            worst[role] = max(worst[role], (values - fresh[role]).abs().max().item())
    return worst
