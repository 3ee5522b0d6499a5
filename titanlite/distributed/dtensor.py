"""What this process holds of a DTensor, and sums of squares over tensors that are sharded.

What it is: the local tensor, the number of ranks that hold the same one, and from both a sum of
squares that is correct in every layout. A tensor that n ranks hold (replicas; norms under tensor
parallelism; a tied embedding under pipeline parallelism) counts 1/n on each of them, so one
all-reduce over all ranks gives the sum for the whole tensors.
What it costs: each tensor is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titanlite.distributed.mesh import sum_dtype
from titanlite.distributed.torch_private import foreach_norm

ROW = 1024


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without a copy; another tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The local tensor of a parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return local_part(parameter.grad)


def num_holders(parameter: Tensor) -> int:
    """How many ranks hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    replicated = [i for i, p in enumerate(parameter.placements) if p == Replicate()]
    return math.prod(mesh.size(i) for i in replicated)


def sum_of_squares(
    pairs: Iterable[tuple[Tensor, Tensor]], shared_params: Collection[Tensor], device: torch.device
) -> Tensor:
    """This rank's part of a sum of squares, a scalar on `device`; the sum of the parts of all ranks
    is that of the whole tensors.

    `pairs`: a parameter, and a tensor that is sharded as it is. `shared_params`: parameters that
    two pipeline stages hold.
    """
    # Tensors with the same number of holders are summed together: few kernels on a GPU
    by_holders: dict[int, list[Tensor]] = {}
    for parameter, tensor in pairs:
        holders = num_holders(parameter)
        if any(parameter is shared for shared in shared_params):
            holders *= 2
        by_holders.setdefault(holders, []).append(local_part(tensor))
    total = torch.zeros((), dtype=sum_dtype(device), device=device)
    for holders, tensors in by_holders.items():
        total += _square(tensors).to(device, non_blocking=True) / holders
    return total


def _square(tensors: list[Tensor]) -> Tensor:
    """The sum of all squares, in float64 where the device has it; on GPUs in few kernels."""
    device = tensors[0].device
    if device.type != "cpu":
        norms = foreach_norm(tensors, 2, dtype=sum_dtype(device))
        return torch.stack(norms).square().sum()
    # fp32 sums within rows of ROW numbers, a float64 sum over rows: an error of 1e-9, without the
    # float64 copy of the whole tensor that torch would make. Tensors that do not divide into rows
    # are copied; most are small.
    row_norms = []
    for tensor in tensors:
        flat = tensor.flatten()
        if flat.numel() % ROW:
            row_norms.append(torch.linalg.vector_norm(flat, dtype=torch.float64)[None])
        else:
            rows = flat.view(flat.numel() // ROW, ROW)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
            row_norms.append(norms.double())
    return torch.cat(row_norms).square().sum()
