"""The mesh: ranks on each axis, time-outs of its groups, and sums over axes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed.mesh import Mesh
from titanlite.parallel.layout import AXES


def mesh_facts(degrees: dict[str, int]) -> tuple:
    mesh = Mesh("cpu", {axis: degrees.get(axis, 1) for axis in AXES}, 77)
    groups = [mesh[axis].get_group() for axis in (*AXES, "dp_shard_cp")]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    assert timeouts == {77}
    ranks = tuple(mesh[axis].get_local_rank() for axis in (*AXES, "dp_shard_cp"))
    total = int(mesh.sum_losses(torch.tensor(10 ** dist.get_rank())))
    return ranks, (mesh.data_rank, mesh.data_size), total, int(mesh.sum_counts(torch.tensor(1)))


@pytest.mark.parametrize(
    ("degrees", "ranks", "data", "total"),
    [  # of the last rank: its place on each axis and on dp_shard_cp; (data_rank, data_size); sum of losses
        ({"dp_shard": 4}, (0, 0, 3, 0, 0, 3), (3, 4), 1111),
        ({"dp_replicate": 2, "dp_shard": 2}, (0, 1, 1, 0, 0, 1), (3, 4), 1111),
        ({"dp_replicate": 4}, (0, 3, 0, 0, 0, 0), (3, 4), 1111),
        ({"dp_shard": 2, "cp": 2}, (0, 0, 1, 1, 0, 3), (1, 2), 1111),
        ({"pp": 2, "tp": 2}, (1, 0, 0, 0, 1, 0), (0, 1), 1010),  # the two of a tp line hold the same loss
        ({"cp": 2, "tp": 2}, (0, 0, 0, 1, 1, 1), (0, 1), 1010),
    ],
)
def test_mesh_axes_ranks_and_sums(pool, degrees, ranks, data, total):
    assert pool.run(4, mesh_facts, degrees)[3] == (ranks, data, total, data[1])
