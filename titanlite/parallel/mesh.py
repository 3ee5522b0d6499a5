"""The processes as a grid: one axis per kind of parallelism.

What it is: a DeviceMesh with five named axes, outermost first: pp (pipeline), dp_replicate (copies of the model),
dp_shard (FSDP), cp (context), tp (tensor). Inner axes talk most, so they map to neighbouring processes of a node.
An axis that is not used has size 1: code that works along an axis needs no case for its absence. The rooms of
pp, cp and tp are not furnished yet; their size is always 1.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")


def build_mesh(device_type: str, *, dp_replicate: int, dp_shard: int, timeout_seconds: int) -> DeviceMesh:
    """The mesh of all processes; the product of the degrees is the world size."""
    mesh = init_device_mesh(device_type, (1, dp_replicate, dp_shard, 1, 1), mesh_dim_names=AXES)
    for axis in AXES:
        # A mesh gives its groups torch's default time-out, and no public way to another (torch 2.11 to 2.13).
        _set_pg_timeout(timedelta(seconds=timeout_seconds), mesh.get_group(axis))
    return mesh


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, size) over the axes that read different data."""
    rank, size = 0, 1
    for axis in DATA_AXES:
        rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
        size *= mesh[axis].size()
    return rank, size


@torch.no_grad()
def sum_over_data(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a tensor over all processes that read different data, in place: one all-reduce per axis in use."""
    for axis in DATA_AXES:
        if mesh[axis].size() > 1:
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value
