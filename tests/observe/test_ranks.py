"""Ranks compared: the slowest and the largest, and when a warning names one."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from titanlite.observe.ranks import PAUSE, Ranks

CPU = torch.device("cpu")


def compared(work: list[float], memory: list[float], has_waits: bool = True) -> dict:
    rank = dist.get_rank()
    return Ranks(CPU).columns(work[rank], memory[rank], has_waits)


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


@pytest.fixture
def warnings(monkeypatch, caplog):
    """Rank 0's warnings after so many logged steps: of each the slowest rank, its seconds and the
    median's.
    """
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    clock = [0.0]
    monkeypatch.setattr("titanlite.observe.ranks.time.monotonic", lambda: clock[0])

    def of(*logged: tuple[int, float, float], apart: float = 1.0) -> list[str]:
        caplog.clear()
        ranks = Ranks(CPU)
        for rank, seconds, median in logged:
            clock[0] += apart
            ranks.warn_of_slow_rank(rank, seconds, median)
        return [record.message for record in caplog.records]

    return of


def test_a_rank_that_stays_slow_is_named_once_in_a_while(warnings):
    slow = (3, 0.5, 0.4)
    assert warnings(slow, slow) == []
    message = "rank 3 is slow: 0.500 s of work per step, the median of the ranks is 0.400 s"
    assert warnings(*[slow] * 20) == [message]
    assert warnings(*[slow] * 6, apart=PAUSE / 2) == [message] * 2


def test_noise_is_no_slow_rank(warnings):
    assert warnings(*[(3, 0.47, 0.4)] * 9) == [], "17 % slower"
    assert warnings(*[(3, 0.0019, 0.001)] * 9) == [], "less than a millisecond"
    assert warnings(*[(3, 0.5, 0.4), (2, 0.5, 0.4)] * 9) == [], "another one each time"
    assert warnings(*[(3, 0.5, 0.4), (3, 0.5, 0.4), (3, 0.41, 0.4)] * 9) == []
