"""The mesh: ranks on each axis, time-outs of its groups, and sums over axes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from titanlite.distributed import process_group
from titanlite.distributed.agreement import gather
from titanlite.distributed.mesh import Mesh
from titanlite.rules.degrees import AXES


def mesh_facts(degrees: dict[str, int]) -> tuple:
    mesh = Mesh("cpu", {axis: degrees.get(axis, 1) for axis in AXES}, 77)
    groups = [mesh[axis].get_group() for axis in (*AXES, "dp_shard_cp")]
    timeouts = {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    }
    assert timeouts == {77}
    ranks = tuple(mesh[axis].get_local_rank() for axis in (*AXES, "dp_shard_cp"))
    total = int(mesh.sum_losses(torch.tensor(10 ** dist.get_rank())))
    return ranks, (mesh.data_rank, mesh.data_size), total, int(mesh.sum_counts(torch.tensor(1)))


@pytest.mark.parametrize(
    ("degrees", "ranks", "data", "total"),
    # For the last rank: its place on each axis and on dp_shard_cp; (data_rank, data_size); the sum
    # of losses
    [
        ({"dp_shard": 4}, (0, 0, 3, 0, 0, 3), (3, 4), 1111),
        ({"dp_replicate": 2, "dp_shard": 2}, (0, 1, 1, 0, 0, 1), (3, 4), 1111),
        ({"dp_replicate": 4}, (0, 3, 0, 0, 0, 0), (3, 4), 1111),
        ({"dp_shard": 2, "cp": 2}, (0, 0, 1, 1, 0, 3), (1, 2), 1111),
        # The two of a tp line hold the same loss
        ({"pp": 2, "tp": 2}, (1, 0, 0, 0, 1, 0), (0, 1), 1010),
        ({"cp": 2, "tp": 2}, (0, 0, 0, 1, 1, 1), (0, 1), 1010),
    ],
)
def test_mesh_axes_ranks_and_sums(pool, degrees, ranks, data, total):
    assert pool.run(4, mesh_facts, degrees)[3] == (ranks, data, total, data[1])


def gloo_groups_of_a_gpu_run(folder: Path) -> tuple[int, list[int]]:
    """How many groups of this process have gloo, joined as on CUDA.

    NCCL's place is taken by torch's fake group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    init = dist.init_process_group

    def without_nccl(backend: str, device_id: torch.device, **options) -> None:
        init(backend.replace("nccl", "fake"), **options)

    dist.init_process_group = without_nccl
    process_group.join(
        torch.device("cuda", rank), 60, rank, size, dist.FileStore(str(folder / "store"), size)
    )
    Mesh("cpu", dict.fromkeys(AXES, 1) | {"dp_shard": 2, "tp": 2}, 77)
    agreed = gather(rank)
    return sum("gloo" in backend for backend, _ in _world.pg_map.values()), agreed


def test_on_gpus_two_groups_use_gloo_and_no_axis_of_the_mesh(pool, tmp_path):
    """That of messages between hosts, and that of checkpoints."""
    assert pool.run(4, gloo_groups_of_a_gpu_run, tmp_path) == [(2, [0, 1, 2, 3])] * 4
