"""Runs one step as train.py does, and records it.

What it is: the calls of train.py's loop, in its order, on a model that `build_program` of
`titanlite plan` has built. On real ranks it has the weights of a run that begins, random tokens,
and numbers; on a pretended rank, tensors have only shapes.
Why it is here: plan's own step leaves out what a step does only if it is logged, and what the hosts
agree on. This one leaves out nothing that communicates.
What it costs: on two cores a second for a small model, after the start of the processes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config
from titanlite.data.rows import Batch, count_targets
from titanlite.distributed.agreement import bitwise_or
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.torch_private import join_pretended_group, pretended_tensors
from titanlite.model.flavors import LlamaConfig
from titanlite.observe.ranks import Ranks
from titanlite.optim.clip import clip_gradients
from titanlite.rules.degrees import num_processes
from titanlite.tools.explain.event_recorder import EventRecorder
from titanlite.tools.explain.events import Event
from titanlite.tools.explain.module_path import ModulePath
from titanlite.tools.plan.trace import (
    Program,
    build_parts,
    build_program,
    local_zeros,
    watch,
)
from titanlite.tools.verify.compare import make_batch, take_rows


class Stored(NamedTuple):
    """A parameter of this rank's part of the model."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # of the mesh that it is divided over; empty if it is not
    sizes: tuple[int, ...]  # their numbers of ranks
    # Of each axis: dimension, and for a strided shard the parts that later axes have made before;
    # dimension -1: replicated
    cuts: tuple[tuple[int, int], ...]
    placements: str


class Recorded(NamedTuple):
    """What one rank sends to the process that prints."""

    rank: int
    coordinates: dict[str, int]
    events: list[Event]
    flops_after: int
    peak: dict[str, int]
    stored: list[Stored]


def record_real(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Recorded:
    """Of this rank of a process group that exists; all ranks call it."""
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds)
    config = _eager(config)
    parts = build_parts(config, llama, mesh)
    device = torch.device("cpu")
    program = build_program(parts, config, mesh, device, initialised=True)
    return record(config, llama, mesh, program, real=True)


def record_pretended(
    config: Config, llama: LlamaConfig, degrees: dict[str, int], rank: int
) -> Recorded:
    """Of a rank whose other ranks do not exist."""
    join_pretended_group(rank, num_processes(degrees))
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds)
    config = _eager(config)
    parts = build_parts(config, llama, mesh)
    with pretended_tensors():
        program = build_program(parts, config, mesh, torch.device("cpu"))
        return record(config, llama, mesh, program, real=False)


def _eager(config: Config) -> Config:
    return dataclasses.replace(config, compile=dataclasses.replace(config.compile, loss="false"))


def record(
    config: Config, llama: LlamaConfig, mesh: Mesh, program: Program, real: bool
) -> Recorded:
    """Runs a step and returns what was recorded.

    The second one: in the first the stages of a pipeline send each other additional messages, and
    receive activations into tensors that have no gradient yet, as messages of the backward do.
    """
    recorder = EventRecorder(
        mesh, llama.vocab_size // mesh["tp"].size(), ModulePath(program.parts), values=real
    )
    watch(program, recorder)
    batches = _batches(config, llama, mesh, real)
    if real:
        take_step(config, program, batches, None)
    elif mesh["pp"].size() > 1:
        take_step(config, program, batches[-1:], None)
    with recorder:
        take_step(config, program, batches, recorder)
    coordinates = {axis: mesh[axis].get_local_rank() for axis in mesh.degrees}
    return Recorded(
        dist.get_rank(),
        coordinates,
        recorder.finished(),
        recorder.flops - recorder.flops_before,
        recorder.step_peak,
        [
            _stored(name, parameter)
            for part in program.parts
            for name, parameter in part.named_parameters()
        ],
    )


def _batches(config: Config, llama: LlamaConfig, mesh: Mesh, real: bool) -> list[Batch]:
    """The local batches of this rank in a step."""
    training = config.training
    at_once = training.local_batch_size * mesh.data_size
    number = training.global_batch_size // at_once
    if not real:
        return [local_zeros(config, torch.device("cpu")) for _ in range(number)]
    whole = make_batch(0, config, llama.vocab_size)
    starts = [i * at_once + mesh.data_rank * training.local_batch_size for i in range(number)]
    return [take_rows(whole, row, row + training.local_batch_size) for row in starts]


def take_step(
    config: Config, program: Program, batches: list[Batch], recorder: EventRecorder | None
) -> float:
    """The loop of train.py, once, with what it sends in a step that is logged.

    Of several local batches a pretended rank runs the first, which stands for all before the last,
    and the last.
    """
    stages = program.stages
    mesh = stages.mesh
    device = torch.device("cpu")

    def begins(phase: str, local_batch: int = -1, times: int = 1) -> None:
        if recorder is not None:
            recorder.begins(phase, local_batch, times)

    begins("data")
    num_targets = mesh.sum_counts(count_targets(batches))
    loss = torch.zeros((), device=device)
    runs = list(enumerate(batches))
    times = 1
    if recorder is not None and not recorder.values and len(runs) > 2:
        times = len(runs) - 1
        runs = [runs[0], runs[-1]]
    for i, batch in runs:
        last = i == len(batches) - 1
        begins("forward", i, 1 if last else times)
        loss += stages.forward_backward(batch, num_targets, 1.0, last)
    begins("clip")
    clip_gradients(
        stages.model_parts,
        config.training.max_norm,
        config.optimizer,
        device,
        stages.shared_params,
    )
    begins("update")
    program.optimizer.step()
    program.ema.update()
    program.optimizer.zero_grad()
    begins("agreement")
    bitwise_or(0)
    begins("loss")
    value = float(mesh.sum_losses(loss))
    begins("metrics")
    Ranks(device).columns(work=0.0, memory=0.0)
    return value


def _stored(name: str, parameter: Tensor) -> Stored:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Stored(name, shape, (), (), (), "whole on each rank")
    mesh = parameter.device_mesh
    axes = mesh.mesh_dim_names or ()
    sizes = tuple(mesh.size(i) for i in range(mesh.ndim))
    cuts = []
    for placement in parameter.placements:
        split_factor = getattr(placement, "split_factor", 1)
        cuts.append((getattr(placement, "dim", -1), split_factor))
    placements = ", ".join(
        f"{axis}: {placement}" for axis, placement in zip(axes, parameter.placements, strict=True)
    )
    return Stored(name, shape, tuple(axes), sizes, tuple(cuts), placements)
