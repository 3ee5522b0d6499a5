"""A process group that writes down what is called on it.

Independent of the recorder: it is below torch's dispatcher, where gloo's own group would be. All
collectives of the process, those that C++ calls too, are methods of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import train
from titanlite.config.schema import Config
from titanlite.distributed import process_group
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.torch_private import clone_default_store
from titanlite.model.flavors import LlamaConfig
from titanlite.parallel.parallelize import assign_shard
from titanlite.runtime.phases import Phase, add_listener
from titanlite.tools.explain import step
from titanlite.tools.plan.trace import build_parts, build_step

# Methods of a group -> kind, and which argument has the whole tensor
METHODS = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "barrier": ("barrier", None),
}
# torch 2.11 has these three methods by other names
NAMES_OF_2_11 = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
log: list[tuple[str, tuple[int, ...], int]] = []  # kind, ranks, bytes
within: list[str] = []  # a method may call another one
# A collective frees its tensors in a thread of gloo that holds gloo's lock, and for tensors that
# Python knows it needs Python's, which this thread may have while it waits for gloo's.
kept: list[Any] = []


class LoggedGroup(dist.ProcessGroup):
    """A process group of gloo that logs its calls."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), kind, gloo)
        self._set_default_backend(kind)


def nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(nbytes(item) for item in value)


def logged(name: str, kind: str, whole: int | None) -> Any:
    original = getattr(dist.ProcessGroup, name)

    def method(self: LoggedGroup, *args: Any, **kwargs: Any) -> Any:
        if not within:
            ranks = tuple(dist.get_process_group_ranks(self))
            if kind in ("send", "recv"):
                me = dist.get_rank()
                peer = ranks[args[1]]
                ranks = (me, peer) if kind == "send" else (peer, me)
            log.append((kind, ranks, 0 if whole is None else nbytes(args[whole])))
        within.append(name)
        try:
            work = original(self, *args, **kwargs)
            kept.append(work)
            return work
        finally:
            within.pop()

    # By this name C++ knows that the method calls its own
    method.__code__ = method.__code__.replace(co_name=name)
    return method


for method_name, (method_kind, method_whole) in METHODS.items():
    if not hasattr(dist.ProcessGroup, method_name):
        method_name = NAMES_OF_2_11[method_name]
    setattr(LoggedGroup, method_name, logged(method_name, method_kind, method_whole))


def use_logged_group() -> None:
    """Replaces the process group that exists by one that logs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("logged", clone_default_store())
    dist.barrier()  # all have joined it
    dist.destroy_process_group()
    dist.Backend.register_backend("logged", LoggedGroup, devices=["cpu"])
    dist.init_process_group("logged", store=store, rank=rank, world_size=size)
    # The one before ended with the process group
    process_group._checkpoint_group = dist.new_group(backend="gloo")


def log_run(argv: list[str]) -> list[list[tuple[str, tuple[int, ...], int]]]:
    """What the group saw in each step of a run of train.py, and after the last one."""
    use_logged_group()
    steps: list[list[tuple[str, tuple[int, ...], int]]] = []

    def listen(phase: Phase) -> None:
        if phase == Phase.READ_DATA:  # a step begins
            steps.append([])
            log.clear()
        elif steps:
            steps[-1][:] = log

    add_listener(listen)
    assert train.run(argv) == 0
    steps[-1][:] = log
    return steps


def record_logged(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> tuple[step.Recorded, list[tuple[str, tuple[int, ...], int]], dict[str, list[int]]]:
    """What explain recorded, what the group saw, and the rows that are here of each parameter."""
    use_logged_group()
    take_step = step.take_step

    def take_logged(*args: Any) -> float:
        log.clear()  # of the step before
        loss = take_step(*args)
        seen.extend(log)
        return loss

    seen: list[tuple[str, tuple[int, ...], int]] = []
    step.take_step = lambda *args: take_logged(*args) if args[-1] else take_step(*args)
    mesh = Mesh("cpu", degrees, 60, config.parallel.ep)
    model_parts = build_parts(config, llama, mesh, pretended=False)
    parts = build_step(model_parts, config, mesh, torch.device("cpu"), initialised=True)
    recorded = step.record(config, llama, parts, real=True)
    rows = {}
    with torch.no_grad():
        for part in model_parts:
            for name, parameter in part.named_parameters():
                numbers = torch.arange(parameter.shape[0], dtype=torch.float32)
                while numbers.ndim < parameter.ndim:
                    numbers = numbers.unsqueeze(-1)
                assign_shard(parameter, numbers.expand(parameter.shape).to(parameter.dtype))
                rows[name] = sorted({int(row) for row in local_part(parameter).flatten()})
    return recorded, seen, rows
