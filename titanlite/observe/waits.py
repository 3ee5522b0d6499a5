"""Times the waits for other ranks, where communication is not hidden behind computation.

What it is: `time_waits` puts a call before and a call after each wait of this process for a
collective or a message:
    `Work.wait`            FSDP, messages of a pipeline, and the collectives of `torch.distributed`
    `wait_tensor`          functional collectives, which DTensor uses; an operator in C++, also
                           called by compiled blocks. It gets a kernel in Python that calls the
                           former one
On CUDA waiting means that the stream of the computation waits for another stream. There also:
    `Stream.wait_event`    FSDP communicates in its own streams
    collectives            those that are not asynchronous run in the stream of the computation,
                           without a wait
    `shard_dim_alltoall`   Ulysses, an operator that waits in C++
`Stream.wait_stream`, with which `to_device.py` waits for batches, is not among them.
Why it is here: torch has no hook for it, and a profiler slows the steps that it records. Since it
replaces functions of torch, a run does it only with `metrics.rank_waits`.
What it costs: two marks (`step_times.py`) per wait, and for `wait_tensor` a call from C++ to
Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from titanlite.distributed.torch_private import (
    SHARD_ALL_TO_ALL,
    WAIT_TENSOR,
    OpOverload,
    call_kernel,
)
from titanlite.observe.step_times import StepTimes

P = ParamSpec("P")
T = TypeVar("T")

# The collectives that a step calls by these names: for clipping, counts of targets and rows of
# experts; and in FSDP2, for which newer releases of torch have shorter names
COLLECTIVES = ["all_reduce", "all_to_all_single"]
if hasattr(dist, "all_gather_single"):
    COLLECTIVES += ["all_gather_single", "reduce_scatter_single"]
else:
    COLLECTIVES += ["all_gather_into_tensor", "reduce_scatter_tensor"]
# Kernels are removed with the library that registered them
_libraries: list[torch.library.Library] = []


def time_waits(times: StepTimes, device: torch.device) -> None:
    """Makes `times` mark each wait of this process for other ranks, from now on.

    This replaces functions of torch. Nothing is replaced without `metrics.rank_waits`, or if there
    is one process.
    """
    if not times.has_waits or dist.get_world_size() == 1:
        return
    begin = times.begin_wait
    end = times.end_wait
    work: Any = Work
    work.wait = timed(work.wait, begin, end)
    time_operator(WAIT_TENSOR, begin, end, device)
    if device.type == "cuda":
        time_operator(SHARD_ALL_TO_ALL, begin, end, device)
        time_streams(torch.cuda.Stream, begin, end)
        for name in COLLECTIVES:
            setattr(dist, name, timed(getattr(dist, name), begin, end))


def timed(
    function: Callable[P, T], begin: Callable[[], bool], end: Callable[[], None]
) -> Callable[P, T]:
    """Wraps a function: calls `begin` before and `end` after it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not begin():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            end()

    return call


def time_operator(
    operator: OpOverload, begin: Callable[[], bool], end: Callable[[], None], device: torch.device
) -> None:
    """Registers a kernel for tensors of this device that calls the previous one between `begin`
    and `end`.
    """
    key = device.type.upper()
    kernel = timed(functools.partial(call_kernel, operator), begin, end)
    library = torch.library.Library(operator.namespace, "IMPL")
    library.impl(operator, kernel, key)
    _libraries.append(library)


def time_streams(stream: Any, begin: Callable[[], bool], end: Callable[[], None]) -> None:
    """Times the waits of the current stream for an event.

    `stream`: the class, whose `wait_stream` calls `wait_event`.
    """
    original = stream.wait_event
    timed_wait = timed(original, begin, end)

    def wait_event(self: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if self == torch.cuda.current_stream(self.device):
            timed_wait(self, event)
        else:
            original(self, event)

    def wait_stream(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        original(self, other.record_event())

    stream.wait_event = wait_event
    stream.wait_stream = wait_stream
