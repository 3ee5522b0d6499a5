"""Fully sharded data parallel (FSDP2; ZeRO-3, arXiv 1910.02054; arXiv 2304.11277).

What it is: `fully_shard` on the embedding, each block, the output, and the model for what is left. Every process
stores 1/N of each parameter, its gradient and its optimizer state, N = dp_shard * cp (processes that compute with the
same weights on different tokens). Before a unit computes, its parameters are all-gathered; after, they are freed; in
the backward they are gathered again and the gradients are reduce-scattered. With dp_replicate = R > 1 (HSDP) the
shards' gradients are also all-reduced over the replicas; with N = 1 that is plain data parallel.

What it costs, per process and microbatch, for P parameters (those left by tp and pp), with b bytes per number of the
compute dtype and r of the reduce dtype: all-gather b P (N-1)/N, twice when resharding after the forward;
reduce-scatter r P (N-1)/N; with R replicas an all-reduce of 2 r P/N (R-1)/R. It is hidden behind the computation of
the unit before. Memory: fp32 parameters, gradients and moments are 16 P/N bytes, and the units gathered b each.

The trades, as keys of [parallel]:
* `reshard_after_forward`: never saves the second all-gather and keeps all b P gathered; a number n keeps them sharded
  over n processes (of one node, say), and the second all-gather stays among these.
* `reduce_every_microbatch = false` saves all reduce-scatters but the step's last, and keeps gradients whole: r P bytes.
* `prefetch` gathers more units ahead, at b per parameter of each.
* `cpu_offload` keeps the 16 P/N bytes in CPU memory, at the price of a copy each way and of AdamW on the CPU.

At N = R = 1 it stays for the dtypes: fp32 parameters, compute in `training.compute_dtype`, gradients summed in
`training.reduce_dtype`, the same path on one process and on many. One process that computes in the dtype of its
parameters has no use for it and goes without: it would copy weights and gradients to themselves, a tenth of a small
model's step on CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.config.schema import ParallelConfig
from titanlite.distributed.mesh import Mesh
from titanlite.parallel.chunked_loss import DeferredOutput


def fsdp_units(model: Any) -> list[list[nn.Module]]:
    """What is gathered together, in the order of the forward. A tied embedding, used at both ends, is in none."""
    ends: list[nn.Module] = [] if model.config.tied_embeddings else [model.tok_embeddings, model.norm, model.output]
    here = [[end] if any(True for _ in end.parameters()) else [] for end in ends]
    first, norm, output = here if here else ([], [], [])
    return [unit for unit in (first, *([block] for block in model.layers.values()), norm + output) if unit]


def needs_fsdp(model: Any, config: ParallelConfig, compute: torch.dtype) -> bool:
    """Whether there are other processes, a dtype to cast to, or a memory to offload to.

    Where another axis alone has processes, it does no more than bring gradients into the form of their parameters.
    """
    cast = any(parameter.dtype != compute for parameter in model.parameters())
    return dist.get_world_size() > 1 or cast or config.cpu_offload


def apply_fsdp(model: Any, config: ParallelConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Shards each unit, and what is left with the model itself.

    Gradients are summed, never averaged: the loss is already divided by the global number of targets.
    """
    if not needs_fsdp(model, config, compute):
        return
    replicated = mesh["dp_replicate"].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard_cp"] if replicated else mesh["dp_shard_cp"],
        # Inputs are not cast: the embedding's output has the compute dtype, and the RoPE table must stay fp32.
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False),
    }
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    units = fsdp_units(model)
    # A loss that projects needs what the last unit has, or, tied, what the model itself has.
    at_the_end = not isinstance(model.output, DeferredOutput) and _reshard(config, mesh, last=True)
    for unit in units:
        reshard = at_the_end if unit is units[-1] else _reshard(config, mesh, last=False)
        fully_shard(unit, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=at_the_end, **options)
    for module in model.modules():
        # A single process has nothing to divide by, and a divisor would cost it a pass over all gradients.
        if isinstance(module, FSDPModule) and options["mesh"].size() > 1:
            # A divisor of 1 alone would need PREMUL_SUM, which gloo lacks: ask for a plain sum as well.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch([unit[0] for unit in units], config.prefetch)


def _reshard(config: ParallelConfig, mesh: Mesh, last: bool) -> bool | int:
    """Whether a unit frees its gathered weights after the forward, or over how many processes it keeps them."""
    mode = config.reshard_after_forward
    if mode == "default":
        # The backward begins where the forward ends, and a pipeline would gather anew for each microbatch.
        return not last and mesh["pp"].size() == 1
    return int(mode) if mode.isdecimal() else mode == "always"


def _prefetch(units: list[Any], depth: int) -> None:
    """Each unit starts the gathering of the next `depth`, in the forward and in the backward; 0 changes nothing."""
    if depth:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
            unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])


def set_gradient_reduction(model: nn.Module, last: bool, config: ParallelConfig) -> None:
    """Says whether the coming microbatch's backward sums gradients over processes, or only adds them up locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or config.reduce_every_microbatch)


def assign_shard(parameter: Tensor, full: Tensor) -> None:
    """Copies this process's part of a full tensor into a parameter. Every process has the same `full`: no traffic."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
