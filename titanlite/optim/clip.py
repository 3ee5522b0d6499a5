"""Clipping gradients to a global norm.

What it is: the 2-norm over *all* gradients of all processes, and the scaling of gradients to at
most `max_norm` (arXiv 1211.5063). The norm returned is the one before clipping. Each process sums
the squares of its gradients. A gradient that n processes hold (replicas; norms under tensor
parallelism; a tied embedding under pipeline parallelism) counts 1/n on each of them, so one
all-reduce over all processes is correct in every layout.
Why it is here: `torch.nn.utils.get_total_norm` depends on how tensors are cut: on CPU, torch 2.13
adds the squares one after the other in fp32, with an error of 9e-6 for a million numbers and 4e-4
for ten million. Here long sums of squares are in float64, and the norm is the same on any number of
processes to 1e-8.
What it costs: each process reads its gradients once, and a second time to scale them; one
all-reduce of 8 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.config.schema import OptimizerConfig, TrainingConfig
from titanlite.distributed.mesh import sum_dtype
from titanlite.distributed.torch_private import foreach_norm
from titanlite.distributed.watchdog import mark_phase

ROW = 1024


def build_clip(
    stages: Any,
    optimizer: Any,
    training: TrainingConfig,
    options: OptimizerConfig,
    device: Any,
    states: dict[str, Any],
) -> Callable[[], Tensor]:
    """`clip_grad_norm` for a run.

    In float16 it also scales the loss, and adds the scale to `states`.
    """
    agc = options.agc_factor if options.clip == "agc" else 0.0
    clip = functools.partial(
        clip_grad_norm, stages.model_parts, training.max_norm, device, stages.shared_params, agc
    )
    if training.compute_dtype != "float16":
        return clip
    from titanlite.optim.loss_scale import LossScale

    states["loss_scale"] = loss_scale = LossScale(training, stages, optimizer, device)
    return functools.partial(loss_scale.clip, clip)


@torch.no_grad()
def clip_grad_norm(
    parts: list[Any],
    max_norm: float,
    device: torch.device,
    twice: Collection[Tensor] = (),
    agc: float = 0.0,
) -> Tensor:
    """Scales the parts' gradients in place (not if `max_norm` is 0) and returns their global norm
    before the scaling.

    The norm is an fp32 scalar that stays on the device: reading it waits for the device, so the
    caller decides when. `twice`: parameters that two pipeline stages hold; `agc`: if not 0, the
    factor of `agc.py`, instead of `max_norm`.
    """
    mark_phase("update", in_step=True)
    parameters = [p for part in parts for p in part.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=sum_dtype(device), device=device)
    held: dict[int, list[Tensor]] = {}  # gradients by the number of processes that hold them
    for parameter in parameters:
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        held.setdefault(
            _replication(parameter) * (2 if any(parameter is p for p in twice) else 1), []
        ).append(local)
    for holders, gradients in held.items():
        total += _square(gradients).to(device, non_blocking=True) / holders
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = total.sqrt().float()
    if agc:
        from titanlite.optim.agc import clip_units

        clip_units(parts, agc)
    elif max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=device.type != "mps")
    return norm


def _square(gradients: list[Tensor]) -> Tensor:
    """The sum of all squares, in float64 where the device has it; on GPUs in few kernels."""
    if gradients[0].device.type == "cpu":
        # fp32 sums within rows of ROW numbers, a float64 sum over rows: an error of 1e-9, without
        # the float64 copy of the whole gradient that torch would make. Gradients that do not divide
        # into rows are copied; most are small.
        norms = []
        for flat in (gradient.flatten() for gradient in gradients):
            if flat.numel() % ROW:
                norms.append(torch.linalg.vector_norm(flat, dtype=torch.float64)[None])
            else:
                rows = flat.view(flat.numel() // ROW, ROW)
                norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double())
        return torch.cat(norms).square().sum()
    return (
        torch.stack(foreach_norm(gradients, 2, dtype=sum_dtype(gradients[0].device))).square().sum()
    )


def _replication(parameter: Tensor) -> int:
    """How many processes hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(i) for i, placement in enumerate(parameter.placements) if placement == Replicate()
    )
