"""The processes as a grid: one axis per kind of parallelism.

What it is: a grid with five named axes, outermost first. Inner axes talk most, so they map to neighbouring
processes of a node. An axis that is not used has size 1: code that works along an axis needs no case for its absence.

    axis          what differs along it              what is the same
    pp            the layers held                    the batch
    dp_replicate  the sequences read                 the shard of the weights held
    dp_shard      the sequences read, the shard      the weights computed with
    cp            the part of each sequence, shard   the sequences, the weights computed with
    tp            the part of each matrix            the sequences

Context parallel processes compute with the same weights on different tokens, as data parallel ones do. So weights are
sharded over both: `dp_shard_cp` is dp_shard and cp as one axis.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.distributed.torch_private import set_group_timeout

DATA_AXES = ("dp_replicate", "dp_shard")  # along these, processes read different sequences
LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp")  # along these, they hold different parts of the loss


class Mesh:
    """The grid by axis: `mesh["tp"]` is this process's line of it, `mesh["dp_replicate", "dp_shard_cp"]` its plane.

    Two DeviceMeshes of the same processes: FSDP2 and tensor parallel need one mesh that has both their axes, and a
    DeviceMesh offers no public way to join two of its axes (torch 2.11 to 2.13). The cost: pp, dp_replicate and tp have
    two process groups each, of which one is used.
    """

    def __init__(self, device_type: str, degrees: Mapping[str, int], timeout_seconds: int) -> None:
        """`degrees`: axis -> size, outermost first; the product is the world size."""
        self.device_type, self.degrees = device_type, dict(degrees)
        sizes = {"pp": degrees["pp"], "dp_replicate": degrees["dp_replicate"]}
        sizes |= {"dp_shard_cp": degrees["dp_shard"] * degrees["cp"], "tp": degrees["tp"]}
        self._weights, self._tokens = (
            init_device_mesh(device_type, tuple(s.values()), mesh_dim_names=tuple(s)) for s in (sizes, degrees)
        )
        for group in (*self._weights.get_all_groups(), *self._tokens.get_all_groups()):
            set_group_timeout(group, timeout_seconds)  # else torch's default
        self._lines: dict[str | tuple[str, ...], DeviceMesh] = {}  # a DeviceMesh makes a new one at each access

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes not in self._lines:
            names = {axes} if isinstance(axes, str) else set(axes)
            mesh = self._weights if names <= set(self._weights.mesh_dim_names or ()) else self._tokens
            self._lines[axes] = mesh[axes]
        return self._lines[axes]


def data_rank(mesh: Mesh) -> tuple[int, int]:
    """(rank, size) over the axes that read different data."""
    rank, size = 0, 1
    for axis in DATA_AXES:
        rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
        size *= mesh[axis].size()
    return rank, size


@torch.no_grad()
def sum_over(value: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """The sum of a tensor over the processes along these axes, in place: one all-reduce per axis in use."""
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(value, group=mesh[axis].get_group())
    return value
