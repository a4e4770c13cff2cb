"""Operators on trees of draft tokens.

A tree has ``n = num_draft_tokens`` nodes a request. Node 0 is the root (the last confirmed token); node ``i >= 1`` is
the ``i``-th drafted token kept. SGLang walks a tree through two tables: a node's first child and its next sibling, -1
for none.
"""

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # values of SGLang's TreeMaskMode that are supported here


def _links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every node, both in ascending node order.

    Parameters
    ----------
    parents : Tensor, int64 ``[bs, n]``
        Node number of the parent, always smaller than the node's own; -1 for nodes that hang nowhere.

    Returns
    -------
    first_child, next_sibling : Tensor, int64 ``[bs, n]``
    """
    n = parents.shape[1]
    nodes = torch.arange(n)
    child_of = parents[:, None, :] == nodes[None, :, None]  # [bs, parent, child]
    sibling_of = (parents[:, None, :] == parents[:, :, None]) & (parents >= 0)[:, :, None] & (nodes > nodes[:, None])
    return _first_true(child_of), _first_true(sibling_of)


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first True along the last dimension, -1 where there is none."""
    return torch.where(flags.any(-1), flags.to(torch.uint8).argmax(-1), -1)


def _parents(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """Parents of the kept nodes.

    Drafting numbers its candidates: ``topk`` children of the root first, then ``topk`` for each expanded node. So
    candidate ``c`` belongs to expansion ``c // topk``; expansion 0 is the root's, expansion ``e`` that of candidate
    ``parent_list[e]``.

    Parameters
    ----------
    parent_list : Tensor, int64 ``[bs, expansions]`` (no columns when there is only one drafting step)
    selected_index : Tensor, int64 ``[bs, n - 1]``, ascending

    Returns
    -------
    Tensor, int64 ``[bs, n]``
        -1 for the root, and for a node whose parent was not kept.
    """
    bs, kept = selected_index.shape
    expansion = selected_index // topk
    parents = torch.zeros(bs, kept, dtype=torch.int64)
    if parent_list.shape[1] > 0:
        candidate = parent_list.gather(1, expansion)
        found = _first_true(candidate[:, :, None] == selected_index[:, None, :])
        parents = torch.where(expansion == 0, 0, torch.where(found >= 0, found + 1, -1))
    return torch.cat([torch.full((bs, 1), -1), parents], dim=1)


def _ancestry(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which nodes each node may attend to, and how deep it lies.

    Returns
    -------
    mask : Tensor, bool ``[bs, n, n]``
        True for the node itself, its ancestors and the root.
    levels : Tensor, int64 ``[bs, n]``
        0 for the root; at most ``depth``.
    """
    bs, n = parents.shape
    mask = torch.eye(n, dtype=torch.bool).repeat(bs, 1, 1)
    mask[:, :, 0] = True
    levels = (torch.arange(n) > 0).long().repeat(bs, 1)
    ancestor = parents
    for _ in range(depth - 1):
        above = ancestor > 0
        here = ancestor.clamp(min=0)
        mask.scatter_(2, here[:, :, None], mask.gather(2, here[:, :, None]) | above[:, :, None])
        levels += above
        ancestor = torch.where(above, parents.gather(1, here), 0)
    return mask, levels


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Turn the kept candidates of a round of drafting into a tree.

    Parameters
    ----------
    parent_list, selected_index : Tensor, int64 ``[bs, expansions]``, ``[bs, n - 1]`` (see `_parents`)
    verified_seq_len : Tensor, int ``[bs]``
    tree_mask : Tensor, bool, flat, written
        QLEN_ONLY: ``[bs, n, n]``. FULL_MASK: for each request ``[n, seq_len + n]``, of which only the last ``n``
        columns are written (the caller filled the rest).
    positions : Tensor, int64 ``[bs * n]``, written
    retrieve_index, retrieve_next_token, retrieve_next_sibling : Tensor, int64 ``[bs, n]``, written
        Row number in the flat batch, first child, next sibling.
    topk, depth, draft_token_num : int
        Branching, drafting steps and ``n``.
    """
    bs, n = verified_seq_len.numel(), draft_token_num
    parents = _parents(parent_list[:bs].long(), selected_index[:bs].long(), topk)
    mask, levels = _ancestry(parents, depth)
    positions.copy_((levels + verified_seq_len[:, None]).reshape(-1))
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    first_child, next_sibling = _links(parents)
    retrieve_next_token.copy_(first_child)
    retrieve_next_sibling.copy_(next_sibling)

    if tree_mask_mode == QLEN_ONLY:
        tree_mask[: mask.numel()] = mask.reshape(-1)
    elif tree_mask_mode == FULL_MASK:
        start = 0
        for own, seq_len in zip(mask, verified_seq_len.tolist(), strict=True):
            size = n * (seq_len + n)
            tree_mask[start : start + size].view(n, seq_len + n)[:, seq_len:] = own
            start += size
    else:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} has no CPU version (bit-packed masks are for CUDA)")


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of a tree that is given by its mask alone (NGRAM speculation).

    Parameters
    ----------
    tree_mask : Tensor, bool, ``[bs, n, n]`` or flat
        True where the column is the row's node or one of its ancestors.
    verified_seq_len : Tensor, int ``[bs]``
    positions : Tensor, int64 ``[bs * n]``, written
    retrive_index, retrive_next_token, retrive_next_sibling : Tensor, int64 ``[bs, n]``, written
    """
    bs, n = batch_size, draft_token_num
    nodes = torch.arange(n)
    ancestors = tree_mask.reshape(bs, n, n).bool() & (nodes < nodes[:, None])
    # Ancestors have smaller numbers than descendants, so the parent is the largest one.
    parents = torch.where(ancestors, nodes, -1).amax(-1)
    positions.copy_((ancestors.sum(-1) + verified_seq_len[:, None]).reshape(-1))
    retrive_index.copy_(torch.arange(bs * n).view(bs, n))
    first_child, next_sibling = _links(parents)
    retrive_next_token.copy_(first_child)
    retrive_next_sibling.copy_(next_sibling)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target's own choices down each tree.

    At a node the target has chosen one token; the walk goes on to the child that drafted it, and ends where none did.

    Parameters
    ----------
    predicts : Tensor, int32 ``[bs * n]``, written
        The target's token, at the rows of the accepted nodes only.
    accept_index : Tensor, int32 ``[bs, max_depth]``, written
        Rows of the accepted nodes in order, the root first; the caller filled it with -1.
    accept_token_num : Tensor, int32 ``[bs]``, written
        Accepted drafts, the root not counted.
    candidates, target_predict : Tensor, int64 ``[bs, n]``
        Drafted tokens, and the target's token after each of them.
    retrive_index, retrive_next_token, retrive_next_sibling : Tensor, int64 ``[bs, n]`` (the spelling is SGLang's)
    """
    drafted, rows = candidates.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    chosen = target_predict.reshape(candidates.shape).tolist()
    for b in range(candidates.shape[0]):
        path = [0]
        while len(path) < accept_index.shape[1]:
            child = first_child[b][path[-1]]
            while child != -1 and drafted[b][child] != chosen[b][path[-1]]:
                child = next_sibling[b][child]
            if child == -1:
                break
            path.append(child)
        accepted = torch.tensor([rows[b][node] for node in path])
        accept_index[b, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[accepted] = torch.tensor([chosen[b][node] for node in path], dtype=predicts.dtype)
