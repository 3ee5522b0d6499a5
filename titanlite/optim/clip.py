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

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.config.schema import OptimizerConfig
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.mesh import sum_dtype
from titanlite.distributed.torch_private import foreach_norm
from titanlite.distributed.watchdog import mark_phase
from titanlite.model.llama import Llama
from titanlite.optim.agc import clip_units

ROW = 1024


def clip_gradients(
    parts: Sequence[Llama],
    max_norm: float,
    options: OptimizerConfig,
    device: torch.device,
    shared_params: Collection[Tensor],
) -> Tensor:
    """Clips gradients as `optimizer.clip` says; returns their norm, as `clip_grad_norm` does."""
    agc_factor = 0.0
    if options.clip == "agc":
        agc_factor = options.agc_factor
    return clip_grad_norm(parts, max_norm, device, shared_params, agc_factor)


@torch.no_grad()
def clip_grad_norm(
    parts: Sequence[Llama],
    max_norm: float,
    device: torch.device,
    shared_params: Collection[Tensor] = (),
    agc_factor: float = 0.0,
) -> Tensor:
    """Scales the parts' gradients in place (not if `max_norm` is 0) and returns their global norm
    before the scaling.

    The norm is an fp32 scalar that stays on the device: reading it waits for the device, so the
    caller decides when. `shared_params`: parameters that two pipeline stages hold; `agc_factor`: if
    not 0, that of `agc.py`, instead of `max_norm`.
    """
    mark_phase("update", in_step=True)
    parameters = [p for part in parts for p in part.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=sum_dtype(device), device=device)
    held: dict[int, list[Tensor]] = {}  # gradients by the number of processes that hold them
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        holders = _replication(parameter)
        if any(parameter is shared for shared in shared_params):
            holders *= 2
        held.setdefault(holders, []).append(local_part(gradient))
    for holders, gradients in held.items():
        total += _square(gradients).to(device, non_blocking=True) / holders
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = total.sqrt().float()
    if agc_factor > 0:
        clip_units(parts, agc_factor)
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
