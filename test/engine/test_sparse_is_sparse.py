"""A verification reads the listed slots and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang.selection.policies import POLICIES

PROMPTS = {"a": tokens(150, seed=1), "b": tokens(90, seed=2)}
NEW_TOKENS = 16


def run(arguments: dict[str, Any], poison: str) -> dict[str, Any]:
    """Generate while K and V of the target are NaN during each verification: at all unlisted slots or at a listed one.

    What is listed depends on the layer's group.

    Selection comes first and may read K anywhere; it is over when the verification starts. Afterwards the pools are
    restored, since a later list may name what this one left out.
    """
    engine = Engine(**arguments)
    backend = engine.worker._wiring.target_backend
    pool, table = engine.target.token_to_kv_pool, engine.target.req_to_token_pool.req_to_token
    attend_to, verify = backend.attend_to, engine.worker.verify
    lists, saved, logits = [], [], []

    def slots(batch: Any, selection: Any, group: int) -> torch.Tensor:
        chosen = []
        for b, (row, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True)):
            committed = table[row, :length].long()
            if selection.positions is None:
                continue
            listed = selection.positions[group, b, : selection.counts[b]].long()
            lists.append(listed.tolist())
            if poison == "unlisted":
                unlisted = torch.ones(len(committed), dtype=torch.bool)
                unlisted[listed] = False
                chosen.append(committed[unlisted])
            elif poison == "one listed":
                chosen.append(committed[listed[5:6]])
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.long)

    def poisoned_verify(batch: Any, *args: Any, **kwargs: Any) -> Any:
        def attend(selection: Any) -> None:
            attend_to(selection)
            groups = backend._groups
            by_group = [slots(batch, selection, group) for group in range(groups.count)]
            for layer in range(engine.target.model_config.num_hidden_layers):
                where = by_group[groups.of(layer)]
                for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                    saved.append((buffer, where, buffer[where].clone()))
                    buffer[where] = float("nan")

        backend.attend_to = attend
        result = verify(batch, *args, **kwargs)
        logits.append(result.logits_output.next_token_logits.clone())
        while saved:
            buffer, where, values = saved.pop()
            buffer[where] = values
        return result

    engine.worker.verify = poisoned_verify
    try:
        outputs = engine.generate(PROMPTS, NEW_TOKENS)
    except Exception as error:  # NaN logits may be refused
        outputs = {"error": str(error)}
    return dict(outputs=outputs, lists=lists, logits=[step.numpy() for step in logits])


def cases() -> list[Any]:
    """Every policy in a chain and a tree; those whose lists are read by no code of their own are slow tests."""
    names = sorted(name for name, policy in POLICIES.items() if not policy.dense)
    quick = ("chain-hybrid", "chain-hybrid-depth", "chain-history", "chain-lookahead", "tree-hybrid", "tree-quest")
    shapes = (
        (f"{shape}-{name}", name, options) for shape, options in (("chain", {}), ("tree", TREE)) for name in names
    )
    return [
        pytest.param(name, options, id=case, marks=[] if case in quick else pytest.mark.slow)
        for case, name, options in shapes
    ]


@pytest.mark.parametrize("policy, shape", cases())
def test_unlisted_slots_are_never_read(models: dict[str, str], policy: str, shape: dict[str, int]) -> None:
    groups = "2" if policy == "hybrid-depth" else "1"
    env = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16", "DUSTIN_POLICY": policy, "DUSTIN_LAYER_GROUPS": groups}
    page_size = 16 if policy == "hybrid" else 1
    arguments = dustin(models, page_size=page_size, **shape)
    clean = in_child(run, arguments, "nothing", env=env)
    poisoned = in_child(run, arguments, "unlisted", env=env)
    assert clean["lists"] and all(len(listed) == 40 for listed in clean["lists"])
    assert poisoned["lists"] == clean["lists"]
    assert poisoned["outputs"] == clean["outputs"]
    for a, b in zip(poisoned["logits"], clean["logits"], strict=True):
        assert (a == b).all(), "the logits must be equal bit for bit"


@pytest.mark.parametrize(
    "policy, shape, groups",
    [("hybrid", TREE, 2), ("history", {}, 4), ("quest", {}, 2), pytest.param("quest", {}, 4, marks=pytest.mark.slow)],
)
def test_each_group_of_layers_reads_its_own_list(
    models: dict[str, str], policy: str, shape: dict[str, int], groups: int
) -> None:
    env = {
        "DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16", "DUSTIN_POLICY": policy, "DUSTIN_LAYER_GROUPS": str(groups),
    }  # fmt: skip
    clean = in_child(run, dustin(models, **shape), "nothing", env=env)
    poisoned = in_child(run, dustin(models, **shape), "unlisted", env=env)
    assert poisoned["lists"] == clean["lists"] and poisoned["outputs"] == clean["outputs"]
    for a, b in zip(poisoned["logits"], clean["logits"], strict=True):
        assert (a == b).all(), "the logits must be equal bit for bit"
    # The first verification's lists: group by group, two requests each.
    by_request = [clean["lists"][request : 2 * groups : 2] for request in (0, 1)]
    assert all(len(set(map(tuple, lists))) > 1 for lists in by_request), "groups differ"


def test_listed_slots_are_read(models: dict[str, str]) -> None:
    env = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16"}
    clean = in_child(run, dustin(models), "nothing", env=env)
    poisoned = in_child(run, dustin(models), "one listed", env=env)
    assert (poisoned["logits"][0] != clean["logits"][0]).any()
