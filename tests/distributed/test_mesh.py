"""The mesh: ranks on each axis, time-outs, sums over axes; and what a rank holds of a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.distributed import process_group
from titanlite.distributed.agreement import gather
from titanlite.distributed.dtensor import local_part, num_holders, sum_of_squares
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


CPU = torch.device("cpu")
# Rows of 1,024 numbers are summed in another way than what is left
SIZES = ((4, 1024), (6, 10), (8,))


def sums_on_a_mesh() -> list[tuple[int, int, float]]:
    """For each tensor: holders, elements here, and the sum of squares over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for size in SIZES:
        whole = torch.randn(size, generator=torch.Generator().manual_seed(1))
        for placements in ([Replicate()] * 2, [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
            tensor = distribute_tensor(whole, mesh, placements)
            total = sum_of_squares([(tensor, tensor)], [], CPU)
            dist.all_reduce(total)
            found.append((num_holders(tensor), local_part(tensor).numel(), float(total)))
    return found


def test_a_sum_over_ranks_is_that_of_the_whole_tensor(pool):
    for found in pool.run(4, sums_on_a_mesh):
        for i, size in enumerate(SIZES):
            whole = torch.randn(size, generator=torch.Generator().manual_seed(1)).double()
            rows = found[3 * i : 3 * i + 3]
            assert [holders for holders, _, _ in rows] == [4, 2, 1]
            elements = [elements for _, elements, _ in rows]
            assert elements[:2] == [whole.numel(), whole.numel() // 2]
            for _, _, total in rows:
                # fp32 within rows of 1,024 numbers
                assert abs(total / float(whole.square().sum()) - 1) < 1e-7


def test_a_parameter_of_two_stages_counts_half():
    shared = torch.nn.Parameter(torch.full((3,), 2.0))
    own = torch.nn.Parameter(torch.full((2,), 3.0))
    pairs = [(shared, shared.data), (own, own.data)]
    assert float(sum_of_squares(pairs, [shared], CPU)) == pytest.approx(12 / 2 + 18)
    assert num_holders(own) == 1
    assert local_part(own) is own
