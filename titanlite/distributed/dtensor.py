"""The local parts of DTensors, and sums of squares over sharded tensors.

What it is: the local tensor, the number of ranks that hold the same one, and a sum of squares that
is correct in every layout. A tensor that n ranks hold (replicas; norms under tensor
parallelism; a tied embedding under pipeline parallelism) counts 1/n on each of them, so one
all-reduce over all ranks gives the sum for the whole tensors.
What it costs: each tensor is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.distributed.torch_private import foreach_norm

ROW = 1024


def local_part(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, without a copy; a plain tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Returns the local tensor of a parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return local_part(parameter.grad)


def with_gradients(parts: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Lists the parameters that have a gradient, each with it."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None:
                pairs.append((parameter, parameter.grad))
    return pairs


def num_holders(parameter: Tensor) -> int:
    """Counts the ranks that hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    replicated = [i for i, p in enumerate(parameter.placements) if p == Replicate()]
    return math.prod(mesh.size(i) for i in replicated)


def sum_of_squares(
    pairs: Iterable[tuple[Tensor, Tensor]], shared_params: Collection[Tensor], device: torch.device
) -> Tensor:
    """Computes this rank's part of a sum of squares, a scalar on `device`. Summed over all ranks,
    the parts give the sum of squares of the whole tensors.

    `pairs`: a parameter, and a tensor with the same sharding. `shared_params`: parameters that two
    pipeline stages hold.
    """
    # Tensors with the same number of holders are summed together, for few kernels on a GPU
    by_holders: dict[int, list[Tensor]] = {}
    for parameter, tensor in pairs:
        holders = num_holders(parameter)
        if any(parameter is shared for shared in shared_params):
            holders *= 2
        by_holders.setdefault(holders, []).append(local_part(tensor))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for holders, tensors in by_holders.items():
        total += _square(tensors).to(device, non_blocking=True) / holders
    return total


def _square(tensors: list[Tensor]) -> Tensor:
    """Sums all squares in float64; on GPUs in few kernels."""
    device = tensors[0].device
    if device.type != "cpu":
        norms = foreach_norm(tensors, 2, dtype=torch.float64)
        return torch.stack(norms).square().sum()
    # Rows of ROW numbers are summed in fp32, and the row sums in float64: the error is 1e-9, and no
    # float64 copy of the whole tensor is made, as torch would do. Tensors whose size ROW does not
    # divide are copied; most are small.
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
