"""A real SGLang scheduler in a child process, driven by hand.

A server takes half a minute to start, most of it imports, and hides its pools. Here a fork server imports SGLang once;
each case forks from it, builds the unmodified `Scheduler` for its arguments and steps it, with the KV pools, the radix
tree and the worker within reach. Nothing is mocked; only the event loop is ours, since a test must see between steps.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from array import array
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

_context: Any = None
# SGLang's own accounts, read after every batch: no slot lost, freed twice, or used after it was freed. SGLang #27789 is
# a leak that showed only under load.
_STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def in_child(case: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, timeout: float = 180) -> Any:
    """Run ``case(*args)`` in a fresh child of the fork server and return what it returns.

    Raises
    ------
    RuntimeError
        The child failed; with its traceback.
    """
    global _context
    if _context is None:
        # Before the fork server loads OpenMP: idle threads of a second core cost these models half of their time.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["engine_preload"])
        # The fork server passes over a module that it does not find, and it looks for it along PYTHONPATH alone.
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            forkserver.ensure_running()
    parent, child = _context.Pipe()
    process = _context.Process(target=_run, args=(child, case, args, env or {}), daemon=True)
    process.start()
    child.close()
    try:
        if not parent.poll(timeout):
            raise RuntimeError(f"{case.__name__} did not finish in {timeout} s")
        good, value = parent.recv()
    except EOFError:
        raise RuntimeError(f"{case.__name__} died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not good:
        raise RuntimeError(f"{case.__name__} failed:\n{value}")
    return value


def _run(pipe: Any, case: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
    os.environ.update(_STRICT | env)
    try:
        pipe.send((True, case(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Engine:
    """One scheduler and the requests given to it.

    Parameters
    ----------
    kwargs
        SGLang's server arguments.
    """

    def __init__(self, **kwargs: Any) -> None:
        import torch
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        torch.set_num_threads(1)  # barriers of several threads cost tiny models more than they save
        defaults: dict[str, Any] = dict(
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            grammar_backend="none",
            mem_fraction_static=0.2,
            max_total_tokens=4096,
            max_running_requests=8,
            disable_overlap_schedule=True,
            log_level="error",
        )
        args = ServerArgs(**(defaults | kwargs))
        publish(args, role="scheduler")
        self.scheduler = Scheduler(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        self.worker = self.scheduler.draft_worker
        self.target = self.scheduler.tp_worker.model_runner
        self.steps = 0
        self._requests: dict[str, Any] = {}

    @property
    def tree(self) -> Any:
        """The radix tree."""
        return self.scheduler.tree_cache

    @property
    def allocator(self) -> Any:
        """The KV slot allocator."""
        return self.scheduler.token_to_kv_pool_allocator

    def add(
        self, rid: str, input_ids: list[int], new_tokens: int, priority: int | None = None, **sampling: Any
    ) -> None:
        """Queue a greedy request; `priority` is SGLang's, for launches with ``enable_priority_scheduling``."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, **sampling)
        params.normalize(None)
        params.verify(self.target.model_config.vocab_size)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=priority,
        )
        self.scheduler.process_input_requests([request])
        queued = self.scheduler.waiting_queue
        self._requests[rid] = next(r for r in queued if r.rid == rid)

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        scheduler = self.scheduler
        return bool(scheduler.waiting_queue or scheduler.last_batch or not scheduler.running_batch.is_empty())

    def step(self) -> None:
        """Run one batch as SGLang's event loop does."""
        import torch

        scheduler = self.scheduler
        with torch.no_grad():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if batch:
                result = scheduler.run_batch(batch)
                scheduler.process_batch_result(batch, result)
                self.steps += 1
            scheduler.last_batch = batch
            scheduler.invariant_checker.self_check_during_busy()

    def run(self) -> None:
        """Step until nothing is left; SGLang accounts for every slot after each batch and at the end."""
        while self.busy:
            self.step()
        self.scheduler.on_idle()

    def output(self, rid: str) -> list[int]:
        """Token ids that request `rid` would be answered with: an accepted run may go on past its end."""
        return list(self._requests[rid].output_ids_through_stop)

    def request(self, rid: str) -> Any:
        """SGLang's request object."""
        return self._requests[rid]

    def generate(self, prompts: dict[str, list[int]], new_tokens: int) -> dict[str, list[int]]:
        """Run requests together and return their tokens."""
        for rid, ids in prompts.items():
            self.add(rid, ids, new_tokens)
        self.run()
        return {rid: self.output(rid) for rid in prompts}

    def leaked(self) -> int:
        """Slots that are neither free nor in the radix tree."""
        return int(self.scheduler.max_total_num_tokens - self.allocator.available_size() - self.tree.evictable_size())
