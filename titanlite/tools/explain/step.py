"""Runs one step as train.py does, and records it.

What it is: the step of train.py (`parallel/step.py`), and what train.py sends when it logs one, on
a model that `build_step` of `titanlite plan` has built. On real ranks it has the weights of a run
that begins, random tokens, and numbers; on a pretended rank, tensors have only shapes.
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
from titanlite.data.rows import Batch
from titanlite.distributed.agreement import bitwise_or
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.observe.ranks import compare_ranks
from titanlite.parallel.step import StepParts, Unmeasured, optimizer_step
from titanlite.rules.degrees import num_processes
from titanlite.tools.explain.event_recorder import EventRecorder
from titanlite.tools.explain.events import Event
from titanlite.tools.explain.module_path import ModulePath
from titanlite.tools.plan.trace import (
    build_parts,
    build_step,
    local_zeros,
    watch,
)
from titanlite.tools.torch_private import join_pretended_group, pretended_tensors
from titanlite.tools.verify.compare import make_batch, take_rows


class Stored(NamedTuple):
    """A parameter of this rank's part of the model."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # of the mesh that it is divided over; empty if it is not
    sizes: tuple[int, ...]  # their numbers of ranks
    # For each axis the dimension, -1 if replicated, and for a strided shard the number of parts
    # that later axes have made before
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
    """Records this rank of a process group that exists; all ranks call it."""
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    config = _eager(config)
    model_parts = build_parts(config, llama, mesh, pretended=False)
    parts = build_step(model_parts, config, mesh, torch.device("cpu"), initialised=True)
    return record(config, llama, parts, real=True)


def record_pretended(
    config: Config, llama: LlamaConfig, degrees: dict[str, int], rank: int
) -> Recorded:
    """Records a rank whose other ranks do not exist."""
    join_pretended_group(rank, num_processes(degrees))
    mesh = Mesh("cpu", degrees, config.comm.group_timeout_seconds, config.parallel.ep)
    config = _eager(config)
    model_parts = build_parts(config, llama, mesh, pretended=True)
    with pretended_tensors():
        parts = build_step(model_parts, config, mesh, torch.device("cpu"))
        return record(config, llama, parts, real=False)


def _eager(config: Config) -> Config:
    return dataclasses.replace(config, compile=dataclasses.replace(config.compile, loss="false"))


def record(config: Config, llama: LlamaConfig, parts: StepParts, real: bool) -> Recorded:
    """Runs a step and returns what was recorded.

    The second one: in the first the stages of a pipeline send each other additional messages, and
    receive activations into tensors that have no gradient yet, as messages of the backward do.
    """
    mesh = parts.stages.mesh
    model_parts = parts.stages.model_parts
    recorder = EventRecorder(
        mesh, llama.vocab_size // mesh["tp"].size(), ModulePath(model_parts), values=real
    )
    watch(parts, recorder)
    batches = _batches(config, llama, mesh, real)
    if real:
        take_step(parts, batches, None)
    elif mesh["pp"].size() > 1:
        take_step(parts, batches[-1:], None)
    with recorder:
        take_step(parts, batches, recorder)
    axes = [*mesh.degrees, "ep"] if mesh.ep > 1 else [*mesh.degrees]
    coordinates = {axis: mesh[axis].get_local_rank() for axis in axes}
    return Recorded(
        dist.get_rank(),
        coordinates,
        recorder.finished(),
        recorder.flops - recorder.flops_before,
        recorder.step_peak,
        [
            _stored(name, parameter)
            for part in model_parts
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


class _Phases(Unmeasured):
    """Tells a recorder which part of the step begins.

    `numbers`: of the local batches that run, in order; `times`: how often the first one counts.
    """

    def __init__(self, recorder: EventRecorder, numbers: list[int], times: int) -> None:
        self.recorder = recorder
        self.numbers = numbers
        self.times = times

    def before_step(self, batches: list[Batch]) -> None:
        self._forward(0)

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        if i + 1 < num_batches:
            self._forward(i + 1)
        else:
            self.recorder.begins("clip", -1, 1)

    def before_update(self) -> None:
        self.recorder.begins("update", -1, 1)

    def after_update(self) -> None:
        self.recorder.begins("balance", -1, 1)

    def _forward(self, i: int) -> None:
        is_last = i == len(self.numbers) - 1
        self.recorder.begins("forward", self.numbers[i], 1 if is_last else self.times)


def take_step(parts: StepParts, batches: list[Batch], recorder: EventRecorder | None) -> float:
    """The step of train.py, with what it sends when it is logged; returns the loss.

    A pretended rank runs two of several local batches: the last one, and the first, which stands
    for all before the last.
    """
    mesh = parts.stages.mesh
    numbers = list(range(len(batches)))
    times = 1
    if recorder is not None and not recorder.values and len(batches) > 2:
        times = len(batches) - 1
        numbers = [0, len(batches) - 1]
    measures = Unmeasured()
    if recorder is not None:
        measures = _Phases(recorder, numbers, times)

    def begins(phase: str) -> None:
        if recorder is not None:
            recorder.begins(phase, -1, 1)

    begins("data")
    samples = range(len(batches) * len(batches[0].tokens) * mesh.data_size)
    result = optimizer_step(1, [batches[i] for i in numbers], samples, parts, measures)
    begins("agreement")
    bitwise_or(0)
    begins("loss")
    loss = float(mesh.sum_losses(result.loss))
    begins("metrics")
    parts.balance.columns()
    compare_ranks(parts.device, work=0.0, memory=0.0, has_waits=False)
    return loss


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
