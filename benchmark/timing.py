"""Device time of calls, by replays of a CUDA graph on a cold L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
FLUSH_BYTES = 512 * 2**20  # read before each replay; an H200's L2 has 60 MB
GRAPH_SECONDS = 0.06  # longest graph, where there is a choice
MIN_REPEATS = 5
MIN_CALLS = 4


@dataclass(frozen=True)
class Timing:
    """Time of one graph.

    Attributes
    ----------
    median_us, min_us, max_us
        Over the replays, of the whole graph.
    calls
        Calls in the graph.
    repeats
        Replays.
    """

    median_us: float
    min_us: float
    max_us: float
    calls: int
    repeats: int


class GraphTimer:
    """Times calls on the current GPU.

    Parameters
    ----------
    repeats
        Most replays of a graph.
    seconds
        About how long the replays of one graph may take; at least five are done.
    """

    def __init__(self, repeats: int = 30, seconds: float = 0.2) -> None:
        self._repeats, self._seconds = repeats, seconds
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def time(self, calls: Sequence[Call], *, whole: bool = False) -> Timing:
        """Capture the calls in one graph and time its replays.

        Parameters
        ----------
        calls
            Each reads memory that the ones before it do not leave in the L2. None may wait for the device.
        whole
            Take all of them; otherwise a long graph is cut, to no fewer than four calls.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls = calls if whole else calls[: self._count(calls)]
            for call in calls:  # compiles kernels, and fills caches that copy to the device
                call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has a pool of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = self._replay(graph)
        graph.reset()
        del graph
        torch.cuda.empty_cache()
        return Timing(statistics.median(times), min(times), max(times), len(calls), len(times))

    def _count(self, calls: Sequence[Call]) -> int:
        calls[0]()
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls[0]()
        torch.cuda.synchronize()
        fitting = int(GRAPH_SECONDS / (time.perf_counter() - start))
        return max(1, min(len(calls), max(MIN_CALLS, fitting)))

    def _replay(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        graph.replay()
        torch.cuda.synchronize()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < self._repeats:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.sum()  # also covers the launch, so that no gap is measured
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
            if len(times) >= MIN_REPEATS and time.perf_counter() - begin > self._seconds:
                break
        return times
