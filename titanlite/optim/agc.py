"""Adaptive gradient clipping: each unit's gradient, relative to the unit's weights.

What it is: a unit is a row of a matrix, the weights of one output (of the embedding: one token), or
a whole vector.
A gradient g of a unit with weights w is scaled so that |g| <= factor * max(|w|, 1e-3) in the 2-norm
(NFNets, arXiv 2102.06171, section 4). The floor of 1e-3 lets weights that begin at zero grow.
The last layer is excluded, as in the paper: the output projection, and so a tied embedding.
Why it is here: a global norm scales all gradients by the largest; here a layer with a bad gradient
is clipped alone.
What it costs: each process reads its gradients and weights once, and writes the gradients. FSDP
shards matrices by rows, so a rank has whole units; where it has parts of them, squares are summed:
of the rows of wo and w2 over tp, of the norms' weights over dp_shard and cp. That is one all-reduce
per axis, of 8 bytes for each of these units.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.distributed.dtensor import local_part

EPS = 1e-3
# Over which units are divided, and the device type on which it communicates
Axis = tuple[dist.ProcessGroup, str]


@torch.no_grad()
def clip_units(parts: list[Any], factor: float) -> None:
    """Scales the gradients of the parts' parameters in place, unit by unit."""
    # This process's part of a gradient, and the squares of its units
    clipped: list[tuple[Tensor, Tensor]] = []
    divided: dict[Axis, list[Tensor]] = {}
    for parameter in (p for part in parts for p in _clipped_parameters(part)):
        weight = local_part(parameter)
        gradient = local_part(parameter.grad)
        squares = torch.stack([_squares(gradient), _squares(weight)])  # (2, units)
        clipped.append((gradient, squares))
        for axis in _axes_within_units(parameter):
            divided.setdefault(axis, []).append(squares)
    for (group, device_type), of_axis in divided.items():
        total = torch.cat([squares.flatten() for squares in of_axis]).to(device_type)
        dist.all_reduce(total, group=group)
        for squares, summed in zip(of_axis, total.split([s.numel() for s in of_axis]), strict=True):
            squares.copy_(summed.view_as(squares))
    for gradient, squares in clipped:
        gradient_norm, weight_norm = squares.sqrt()
        # a gradient of 0 stays 0
        scale = (factor * weight_norm.clamp(min=EPS) / gradient_norm).clamp(max=1.0)
        gradient.mul_(scale[:, None] if gradient.ndim == 2 else scale)


def _clipped_parameters(part: Any) -> list[Tensor]:
    """The parameters that have a gradient and are not the last layer's."""
    last = "tok_embeddings" if part.config.tied_embeddings else "output"
    return [
        p for name, p in part.named_parameters() if p.grad is not None and not name.startswith(last)
    ]


def _squares(tensor: Tensor) -> Tensor:
    """The sum of squares of each unit's numbers that are here, fp32: (rows,) of a matrix, (1,) of a
    vector.
    """
    whole = tensor if tensor.ndim == 2 else tensor[None]
    return torch.linalg.vector_norm(whole, dim=1, dtype=torch.float32).square()


def _axes_within_units(parameter: Tensor) -> list[Axis]:
    """The mesh axes whose ranks hold different parts of one unit: columns of a matrix, or parts of
    a vector.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    within = parameter.ndim - 1
    return [
        (mesh.get_group(i), mesh.device_type)
        for i, placement in enumerate(parameter.placements)
        if mesh.size(i) > 1 and placement.is_shard(within)
    ]
