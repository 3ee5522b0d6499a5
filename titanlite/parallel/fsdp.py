"""Fully sharded data parallel (FSDP2; ZeRO-3, arXiv 1910.02054; arXiv 2304.11277).

What it is: `fully_shard` on the units (the embedding, each block, the norm with the output layer),
and on the model for the remaining parameters. If embeddings are tied, as in debug, 1B and 3B, only
blocks are units, and the embedding and the norm remain for the model. The n = dp_shard * cp ranks
compute with the same weights on different tokens, and each stores 1/n of every parameter, of its
gradient and of its optimizer state: dimension 0 is cut into n pieces. Before a unit computes, its
parameters are all-gathered; afterwards they are freed; in the backward they are gathered again, and
the gradients are reduce-scattered. With dp_replicate > 1 (HSDP) each shard's gradient is also
all-reduced over the replicas; n = 1 is then plain data parallel.

    a 4096 x 4096 weight, n = 4: rank 2 holds rows 2048 to 3071. In fp32 these are 16.8 MB of weight
    and 33.6 MB of moments, also between steps. Their gradient, 16.8 MB, exists only from the
    backward to the end of the step.

With tp the weights are already cut over tp, and FSDP divides what a rank has. So with dp_shard = 2
and tp = 2 the placements of a wq of 32 rows are (_StridedShard(0, split_factor=2), Shard(0)):

    rank (dp_shard, tp)    0 (0, 0)    1 (0, 1)    2 (1, 0)    3 (1, 1)
    rows of wq             0 - 7       16 - 23     8 - 15      24 - 31

Why it is here: it works on every model without conditions on its sizes, and its traffic does not
grow with the batch. What it costs, per rank and local batch, for N parameters (after the division
by tp and pp), with b bytes per number of the compute dtype and r of the reduce dtype: all-gather b
N (n-1)/n, twice if weights are freed after the forward; reduce-scatter r N (n-1)/n; with R =
dp_replicate an all-reduce of 2 r N/n (R-1)/R. The communication overlaps with the computation of
another unit. Memory: 16 N/n bytes for fp32 parameters, gradients and moments, plus b bytes per
parameter of each unit that is gathered at the moment.

The trade-offs, as keys of [parallel]:
* `reshard_after_forward`: `never` gathers once per step, with pp once per local batch, and keeps
  all weights gathered, b N bytes; `always` in a pipeline of M microbatches gathers each unit M + 1
  times per local batch; a number keeps weights sharded over that many ranks (for example those of
  one node), which do the second all-gather among themselves.
* `reduce_every_microbatch = false` reduces gradients once per step, not after each local batch,
  and keeps them unsharded until then: r N bytes.
* `prefetch` gathers more units in advance, for b bytes per parameter of each.
* `cpu_offload` keeps the 16 N/n bytes in CPU memory, with a copy in each direction and AdamW on the
  CPU.

FSDP2's `set_is_last_backward(False)` is not called for local batches before the last one. Three
local batches of five units then gather 28 times instead of 27 (two ranks on gloo), because what it
skips also ends a prefetch; and on a GPU the gradients after the first local batch, which the noise
scale reads, would not be complete. What it saves on a GPU is not measured.

On one rank there is nothing to shard or reduce: FSDP would only copy weights and gradients. It is
not applied there, unless `cpu_offload` or `reshard_after_forward` is set. The casts to
`compute_dtype` are then those of `mixed_precision.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from titanlite.config.schema import ParallelConfig
from titanlite.distributed.mesh import Mesh
from titanlite.parallel.deferred_output import DeferredOutput

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


def fsdp_units(model: Llama) -> list[list[nn.Module]]:
    """Lists the modules that are gathered together, in forward order.

    A tied embedding is in no unit: both ends of the model use it.
    """
    blocks: list[nn.Module] = list(model.layers.values())
    units = [[block] for block in blocks]
    if not model.config.tied_embeddings:
        units = [[model.tok_embeddings], *units, [model.norm, model.output]]
    # A pipeline stage has an Identity in place of an end that another stage holds
    units = [[module for module in unit if _has_parameters(module)] for unit in units]
    return [unit for unit in units if unit]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def apply_fsdp(
    model: Llama, config: ParallelConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Shards each unit, and the remaining parameters as the unit of the model itself.

    Gradients are summed, not averaged: the loss is already divided by the global number of targets.
    """
    replicated = mesh["dp_replicate"].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard_cp"] if replicated else mesh["dp_shard_cp"],
        # Inputs are not cast: the embedding's output has the compute dtype, and the RoPE table must
        # stay fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
        ),
    }
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    units = fsdp_units(model)
    # A chunked loss computes the output projection after the forward. Its weight, in the last unit
    # or (if tied) in the unit of the model itself, must stay gathered.
    at_the_end = _reshard(config, mesh, last=True)
    if isinstance(model.output, DeferredOutput):
        at_the_end = False
    mixtures: list[nn.Module] = []
    of_experts = options
    if mesh.ep > 1:  # experts are divided over other ranks than the rest of the block
        axes = ("dp_replicate", "expert_shard") if replicated else "expert_shard"
        of_experts = options | {"mesh": mesh[axes]}
        mixtures = [block.get_submodule("feed_forward.experts") for block in model.layers.values()]
    # Before the blocks that contain them: a unit takes the parameters that no inner unit has
    for experts in mixtures:
        reshard = _reshard(config, mesh, last=False)
        fully_shard(experts, reshard_after_forward=reshard, **of_experts)
    for unit in units:
        reshard = at_the_end if unit is units[-1] else _reshard(config, mesh, last=False)
        fully_shard(unit, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=at_the_end, **options)
    for module in model.modules():
        ranks = (of_experts if module in mixtures else options)["mesh"].size()
        # On a single rank a divisor of 1 would cost a pass over all gradients
        if isinstance(module, FSDPModule) and ranks > 1:
            # With only a divisor of 1, FSDP2 uses PREMUL_SUM, which gloo does not have: request a
            # plain sum too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # `fully_shard` has changed the class of each unit's first module
    sharded: list[FSDPModule] = [unit[0] for unit in units if isinstance(unit[0], FSDPModule)]
    _prefetch(sharded, config.prefetch)


def _reshard(config: ParallelConfig, mesh: Mesh, last: bool) -> bool | int:
    """Returns `reshard_after_forward` for fully_shard: whether, or over how many ranks."""
    mode = config.reshard_after_forward
    if mode == "default":
        # The last unit stays gathered, because the backward begins with it. In a pipeline all stay:
        # otherwise each microbatch would gather the weights again.
        return not last and mesh["pp"].size() == 1
    if mode.isdecimal():
        return int(mode)
    return mode == "always"


def _prefetch(units: list[FSDPModule], depth: int) -> None:
    """Makes each unit start the all-gathers of the next `depth` units, forward and backward.

    0 keeps FSDP2's default.
    """
    if depth == 0:
        return
    for i, unit in enumerate(units):
        following = units[i + 1 : i + 1 + depth]
        previous = units[max(0, i - depth) : i]
        unit.set_modules_to_forward_prefetch(following)
        unit.set_modules_to_backward_prefetch(previous[::-1])
