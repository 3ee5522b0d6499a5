"""Clips gradients to a global norm.

What it is: the 2-norm over *all* gradients of all processes, and the scaling of gradients to at
most `max_norm` (arXiv 1211.5063). The norm returned is the one before clipping. Each process sums
the squares of its gradients. A gradient that n processes hold (replicas; norms under tensor
parallelism; a tied embedding under pipeline parallelism) counts 1/n on each of them, so one
all-reduce over all processes is correct in every layout.
Why it is here: the result of `torch.nn.utils.get_total_norm` depends on how tensors are cut: on
CPU, torch 2.13 adds the squares one after the other in fp32, with an error of 9e-6 for a million
numbers and 4e-4 for ten million (findings/torch_get_total_norm.sh). Here long sums of squares are
in float64, and the norm is the same on any number of processes to 1e-8.
What it costs: each process reads its gradients once, and a second time to scale them; one
all-reduce of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.agreement import is_alone
from titanlite.distributed.dtensor import local_gradient, sum_of_squares, with_gradients
from titanlite.distributed.torch_private import foreach_mul_
from titanlite.model.llama import Llama
from titanlite.optim.agc import clip_units
from titanlite.runtime.phases import Phase, mark_phase


@torch.no_grad()
def clip_gradients(
    parts: Sequence[Llama],
    max_norm: float,
    device: torch.device,
    shared_params: Collection[Tensor] = (),
    agc_factor: float = 0.0,
) -> Tensor:
    """Scales the parts' gradients in place (unless `max_norm` is 0), and returns their global norm
    before scaling.

    The norm is an fp32 scalar that stays on the device: reading it waits for the device, so the
    caller decides when. `shared_params`: parameters that two pipeline stages hold; `agc_factor`: if
    not 0, clip by `agc.py` with this factor instead of by `max_norm`.
    """
    mark_phase(Phase.UPDATE)
    gradients = with_gradients(parts)
    total = sum_of_squares(gradients, shared_params, device)
    if not is_alone():
        dist.all_reduce(total)
    norm = total.sqrt().float()
    if agc_factor > 0:
        clip_units(parts, agc_factor)
    elif max_norm > 0:
        # 1e-6, as in torch's clip_grad_norm_, avoids a division by 0
        parameters = [parameter for parameter, _ in gradients]
        scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place by an fp32 scalar.

    It groups tensors by dtype and device, so that CUDA needs few kernels. There the factor is
    rounded to the gradient's dtype, as a kernel for a single tensor would do too.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_gradient(parameter)
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), gradients in groups.items():
        own_factor = factor.to(device)  # with parallel.cpu_offload, the CPU
        if device.type == "cuda":
            own_factor = own_factor.to(dtype)
        foreach_mul_(gradients, own_factor)
