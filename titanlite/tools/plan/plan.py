"""The plan of one layout of a config on one kind of GPU.

What it is: the counts of a step, traced or estimated, and from them the memory that each rank
needs, the time of a step, and what the communication of each axis takes. The text, the JSON and the
page show this object and compute nothing.
Imports torch only for an exact plan, which runs the program.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.compiled import reason_not_compiled
from titanlite.tools.plan.accuracy import Fitted
from titanlite.tools.plan.advice import Need, Remedy, estimated_needs, remedies, zero_stage
from titanlite.tools.plan.counts import Collective, RankCounts, StepCounts
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.estimate_memory import reserved_bytes, sharded_gradients
from titanlite.tools.plan.machines import Machine
from titanlite.tools.plan.step_time import (
    StepTime,
    bubble_fraction,
    collective_seconds,
    fitted_of,
    ranks_per_node,
    rates_of,
    step_time,
)


@dataclass(frozen=True)
class Traffic:
    """A kind of collective of the busiest rank, in a step."""

    call: Collective
    link: str  # node or network
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The needs, the traffic and the speed of a layout."""

    config: Config
    llama: LlamaConfig
    machine: Machine
    gpus: int
    compiled: bool
    counts: StepCounts
    needs: tuple[Need, ...]  # of each rank of the pp axis
    time: StepTime
    traffic: tuple[Traffic, ...]
    bubble: float  # idle fraction of the pipeline's time
    zero: str

    @property
    def fitted(self) -> Fitted | None:
        """What is known about the speed of this GPU."""
        return fitted_of(self.machine)

    @property
    def worst(self) -> Need:
        """The need of the rank that needs most memory."""
        return max(self.needs, key=lambda need: need.high)

    @property
    def verdict(self) -> str:
        return self.worst.verdict(self.machine.memory_bytes)

    @property
    def remedies(self) -> list[Remedy]:
        """Changes of one key that need less memory; empty if the plan fits."""
        if self.verdict == "fits":
            return []
        return remedies(self.config, self.llama, self.gpus)

    @property
    def recompute_factor(self) -> float:
        """The FLOPs of products and attention, divided by those without recomputation."""
        rank = max(self.counts.ranks, key=_flops)
        recompute = dataclasses.replace(self.config.recompute, mode="none", offload=False)
        without = dataclasses.replace(self.config, recompute=recompute)
        return _flops(rank) / _flops(estimate(without, self.llama, self.gpus).ranks[rank.pp_rank])

    def name_of(self, need: Need) -> str:
        """The name of the rank with this need."""
        return f"rank {need.pp_rank} of pp" if len(self.needs) > 1 else "each rank"

    @property
    def source(self) -> str:
        """The source of the numbers: traced or estimated."""
        if self.counts.source == "estimated":
            return "estimated"
        if self.compiled or offloads(self.config):
            return "traced; memory and times estimated"
        return "traced; times estimated"


def _flops(rank: RankCounts) -> int:
    return sum(product.flops for product in rank.products) + rank.attention_flops


def make_plan(
    config: Config, llama: LlamaConfig, gpus: int, machine: Machine, exact: bool = False
) -> Plan:
    """The plan of a config on so many GPUs; `exact`: from a traced step. Raises ConfigError."""
    config = with_dtype(config, machine)
    estimated = estimate(config, llama, gpus)
    degrees = estimated.degrees
    compiled = not reason_not_compiled(config, degrees, llama.dim, "cuda")
    counts = estimated
    if exact:
        from titanlite.tools.plan.trace import trace  # slow to import, and to run

        counts = trace(config, llama, degrees)
    needs = estimated_needs(config, llama, gpus)
    if exact and not compiled and not offloads(config):
        # The upper end keeps the estimate, since NCCL has buffers that a traced step has not
        for i, rank in enumerate(counts.ranks):
            low, high = reserved_bytes(rank.memory, sharded_gradients(rank, degrees))
            needs[i] = Need(rank.pp_rank, rank.memory, low, max(high, needs[i].high))
    rates = rates_of(machine)
    busiest = max(counts.ranks, key=_flops)
    traffic = [
        Traffic(
            call,
            _link(call, degrees, machine),
            collective_seconds(call, degrees, machine, rates),
        )
        for call in busiest.collectives
        if call.size > 1
    ]
    parallel = config.parallel
    microbatches = config.training.local_batch_size // parallel.pp_microbatch_size
    return Plan(
        config=config,
        llama=llama,
        machine=machine,
        gpus=gpus,
        compiled=compiled,
        counts=counts,
        needs=tuple(needs),
        # Estimated counts also here: the rates of the time model are fitted to them
        time=step_time(estimated, machine, config, llama),
        traffic=tuple(traffic),
        bubble=bubble_fraction(
            parallel.pp_schedule, degrees["pp"], microbatches, parallel.stages_per_process
        ),
        zero=zero_stage(config, degrees, counts.local_batches),
    )


def offloads(config: Config) -> bool:
    """Whether some tensors are in CPU memory; a trace runs on a CPU and cannot tell them apart."""
    parallel = config.parallel
    return parallel.cpu_offload or parallel.optimizer_offload or config.recompute.offload


def with_dtype(config: Config, machine: Machine) -> Config:
    """The config with `training.compute_dtype = auto` resolved for this machine."""
    training = config.training
    if training.compute_dtype == "auto":
        training = dataclasses.replace(training, compute_dtype=machine.half_dtype)
    return dataclasses.replace(config, training=training)


def _link(call: Collective, degrees: dict[str, int], machine: Machine) -> str:
    together = ranks_per_node(call.axis, call.size, degrees, machine)
    return "node" if together >= call.size else "network"
