"""Adaptive gradient clipping: limits each unit's gradient relative to the unit's weights.

What it is: a unit is a row of a matrix (the weights of one output, or in the embedding of one
token), or a whole vector.
A gradient g of a unit with weights w is scaled so that |g| <= factor * max(|w|, 1e-3) in the 2-norm
(NFNets, arXiv 2102.06171, section 4). The floor of 1e-3 lets weights that begin at zero grow.
The last layer is excluded, as in the paper: the output projection, and so a tied embedding.
Why it is here: clipping by the global norm shrinks all gradients if one is large; here a layer with
a bad gradient is clipped alone.
What it costs: each process reads its gradients and weights once, and writes the gradients. FSDP
shards matrices by rows, so a rank has whole units. Where units are cut, their sums of squares are
all-reduced: rows of wo and w2 over tp, weights of norms over dp_shard and cp. This takes one
all-reduce per axis, of 8 bytes for each of these units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.dtensor import local_gradient, local_part
from titanlite.model.llama import Llama

EPS = 1e-3
Axis = tuple[dist.ProcessGroup, str]  # group whose ranks hold parts of units, device type


@torch.no_grad()
def clip_units(parts: Sequence[Llama], factor: float) -> None:
    """Scales the gradients of the parts' parameters in place, unit by unit."""
    # This process's part of each gradient, and the sums of squares of its units
    clipped: list[tuple[Tensor, Tensor]] = []
    divided: dict[Axis, list[Tensor]] = {}
    for part in parts:
        for parameter in _clipped_parameters(part):
            weight = local_part(parameter)
            gradient = local_gradient(parameter)
            squares = torch.stack([_squares(gradient), _squares(weight)])  # (2, units)
            clipped.append((gradient, squares))
            for axis in _axes_within_units(parameter):
                divided.setdefault(axis, []).append(squares)
    for (group, device_type), squares_of_axis in divided.items():
        _sum_over_ranks(squares_of_axis, group, device_type)
    for gradient, squares in clipped:
        gradient_norm, weight_norm = squares.sqrt()
        # a gradient of 0 stays 0
        scale = (factor * weight_norm.clamp(min=EPS) / gradient_norm).clamp(max=1.0)
        if gradient.ndim > 1:
            scale = scale[..., None]  # one per row
        gradient.mul_(scale)


def _sum_over_ranks(tensors: list[Tensor], group: dist.ProcessGroup, device_type: str) -> None:
    """Replaces each tensor by its sum over the group, in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(device_type)
    dist.all_reduce(flat, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, total in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(total.view_as(tensor))


def _clipped_parameters(part: Llama) -> list[nn.Parameter]:
    """Lists the parameters that have a gradient, without those of the last layer."""
    last = "output"
    if part.config.tied_embeddings:
        last = "tok_embeddings"
    parameters = []
    for name, parameter in part.named_parameters():
        if parameter.grad is not None and not name.startswith(last):
            parameters.append(parameter)
    return parameters


def _squares(tensor: Tensor) -> Tensor:
    """Sums the squares of this process's part of each unit, in fp32.

    Returns (rows,) for a matrix, (E, rows) for experts, (1,) for a vector.
    """
    units = tensor if tensor.ndim > 1 else tensor[None]
    return torch.linalg.vector_norm(units, dim=-1, dtype=torch.float32).square()


def _axes_within_units(parameter: Tensor) -> list[Axis]:
    """Lists the mesh axes whose ranks hold different parts of one unit.

    These axes shard the columns of a matrix, or a vector.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    within = parameter.ndim - 1
    axes = []
    for i, placement in enumerate(parameter.placements):
        # `is_shard` is false for a shard by FSDP of a shard by tp (pytorch#167887)
        if mesh.size(i) > 1 and getattr(placement, "dim", None) == within:
            axes.append((mesh.get_group(i), mesh.device_type))
    return axes
