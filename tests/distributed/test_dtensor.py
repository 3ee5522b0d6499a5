"""What a rank holds of a tensor, and sums of squares over all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.distributed.dtensor import local_part, num_holders, sum_of_squares

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
