"""Ranks compared: the slowest and the largest."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titanlite.observe.ranks import compare_ranks

CPU = torch.device("cpu")


def compared(work: list[float], memory: list[float], has_waits: bool = True) -> dict:
    rank = dist.get_rank()
    return compare_ranks(CPU, work[rank], memory[rank], has_waits)


def test_all_ranks_find_the_slowest_and_the_largest(pool):
    found = pool.run(3, compared, [0.25, 0.125, 0.5], [1.0, 3.0, 2.0])
    assert (
        found
        == [
            {
                "memory_max_gib": 3.0,
                "memory_max_rank": 1,
                "slowest_rank": 2,
                "slowest_rank_seconds": 0.5,
                "fastest_rank_seconds": 0.125,
            }
        ]
        * 3
    )


def test_ranks_whose_waits_are_not_measured_are_compared_by_memory_only(pool):
    expected = {"memory_max_gib": 3.0, "memory_max_rank": 1}
    assert pool.run(2, compared, [0.25, 0.125], [1.0, 3.0], False) == [expected] * 2


def test_one_process_has_no_slowest_rank(pool):
    assert pool.run(1, compared, [0.25], [1.0]) == [{"memory_max_gib": 1.0, "memory_max_rank": 0}]
