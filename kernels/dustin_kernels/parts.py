"""Counters by which the program that finishes last knows that it does."""

from functools import lru_cache

import torch
from torch import Tensor

MAX_COUNTERS = 1 << 20


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def part_counters(device: torch.device, count: int) -> Tensor:
    """Counters of finished parts, int32, all 0: a launch counts up and its last program sets them back.

    There is one set a device, so launches that use it must follow one another, as those of one stream do.

    Raises
    ------
    ValueError
        `count` is above `MAX_COUNTERS`.
    """
    if count > MAX_COUNTERS:
        raise ValueError(f"a launch needs {count} counters; there are {MAX_COUNTERS}: make the batch smaller")
    return _counters(device)
