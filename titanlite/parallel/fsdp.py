"""Fully sharded data parallel (FSDP2; ZeRO-3, arXiv 1910.02054; arXiv 2304.11277).

What it is: `fully_shard` on the embedding, each block, the output layer, and on the model for the parameters that are
left. With n = dp_shard * cp ranks, which compute with the same weights on different tokens, each rank stores 1/n of
every parameter, of its gradient and of its optimizer state: dimension 0 is cut into n pieces. Before a unit computes,
its parameters are all-gathered; afterwards they are freed; in the backward they are gathered again, and the gradients
are reduce-scattered. With dp_replicate > 1 (HSDP) each shard's gradient is also all-reduced over the replicas; n = 1 is
then plain data parallel.

    a 4096 x 4096 weight, n = 4: rank 2 holds rows 2048 to 3071. In fp32 that is 16.8 MB of weight, and between steps
    twice that of moments; the gradient takes another 16.8 MB from the backward to the end of the step.

Why it is here: it is the only axis that asks nothing of the model, and its traffic does not grow with the batch.
What it costs, per rank and local batch, for N parameters (those that tp and pp leave), with b bytes per number of the
compute dtype and r of the reduce dtype: all-gather b N (n-1)/n, twice if weights are freed after the forward;
reduce-scatter r N (n-1)/n; with R = dp_replicate an all-reduce of 2 r N/n (R-1)/R. It runs beside the computation of
the unit before. Memory: 16 N/n bytes for fp32 parameters, gradients and moments, plus b bytes per parameter of each
unit that is gathered at the moment.

The trade-offs, as keys of [parallel]:
* `reshard_after_forward`: `never` saves the second all-gather and keeps all b N gathered; a number keeps weights
  sharded over that many ranks (of one node, say), so the second all-gather stays among these.
* `reduce_every_microbatch = false` saves all reduce-scatters but the last of a step and keeps unsharded gradients: r N.
* `prefetch` gathers more units ahead, at b bytes per parameter of each.
* `cpu_offload` keeps the 16 N/n bytes in CPU memory, with a copy in each direction and AdamW on the CPU.

On one rank FSDP still provides the dtypes: fp32 parameters, computation in `training.compute_dtype`, gradients in
`training.reduce_dtype`. If these are equal there is nothing to shard or cast, and the model is left as it is: FSDP
would copy weights and gradients onto themselves, a tenth of a small model's step on CPU.
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


def fsdp_units(model: Any) -> list[list[nn.Module]]:
    """The modules that are gathered together, in forward order. A tied embedding, used at both ends, is in none."""
    ends: list[nn.Module] = [] if model.config.tied_embeddings else [model.tok_embeddings, model.norm, model.output]
    here = [[end] if any(True for _ in end.parameters()) else [] for end in ends]
    first, norm, output = here if here else ([], [], [])
    return [unit for unit in (first, *([block] for block in model.layers.values()), norm + output) if unit]


def needs_fsdp(model: Any, config: ParallelConfig, compute: torch.dtype) -> bool:
    """Whether there are other ranks, a dtype to cast to, or CPU memory to offload to."""
    cast = any(parameter.dtype != compute for parameter in model.parameters())
    return dist.get_world_size() > 1 or cast or config.cpu_offload


def apply_fsdp(model: Any, config: ParallelConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Shards each unit, and the parameters that are left with the model itself.

    Gradients are summed, not averaged: the loss is already divided by the global number of targets.
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
    # With chunks the loss projects: it needs the output weight, in the last unit or, if tied, in the model itself.
    at_the_end = not hasattr(model.output, "projection") and _reshard(config, mesh, last=True)
    for unit in units:
        reshard = at_the_end if unit is units[-1] else _reshard(config, mesh, last=False)
        fully_shard(unit, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=at_the_end, **options)
    for module in model.modules():
        # On a single rank there is nothing to divide by, and a divisor would cost a pass over all gradients.
        if isinstance(module, FSDPModule) and options["mesh"].size() > 1:
            # A divisor of 1 alone uses PREMUL_SUM, which gloo does not have: request a plain sum as well.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch([unit[0] for unit in units], config.prefetch)


def _reshard(config: ParallelConfig, mesh: Mesh, last: bool) -> bool | int:
    """Whether a unit frees its gathered weights after the forward, or over how many ranks it keeps them sharded."""
    mode = config.reshard_after_forward
    if mode == "default":
        # The backward begins where the forward ends; and a pipeline would gather again for each microbatch.
        return not last and mesh["pp"].size() == 1
    return int(mode) if mode.isdecimal() else mode == "always"


def _prefetch(units: list[Any], depth: int) -> None:
    """Each unit starts the all-gathers of the next `depth` units, forward and backward; 0 keeps FSDP2's default."""
    if depth:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
            unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])


def set_gradient_reduction(model: nn.Module, last: bool, config: ParallelConfig) -> None:
    """Sets whether the next backward reduces gradients over ranks or accumulates them locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or config.reduce_every_microbatch)


def assign_shard(parameter: Tensor, full: Tensor) -> None:
    """Copies this rank's part of a full tensor into a parameter. Every rank has the same `full`: no communication."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
