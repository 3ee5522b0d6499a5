"""Compares ranks: finds the slowest, and the one that needs the most memory.

What it is: each rank's seconds of work per step, without the time spent waiting for others, and its
peak memory. All ranks take equally long for a step, because each waits for the slowest; only the
time without waits differs, so seconds are compared only with `metrics.rank_waits`. A warning names
a rank that is clearly slower than the median in three logged steps in a row. Causes are a throttled
or shared device, slow storage, or a layout that gives ranks different work, such as unequal stages
of a pipeline.
What it costs: one all-reduce of 16 bytes per rank, in logged steps.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("titanlite")

# A rank is slow if its work exceeds the median rank's by both this factor and these seconds
RATIO = 1.2
SECONDS = 0.001
IN_A_ROW = 3  # logged steps
PAUSE = 600.0  # seconds between two warnings


class Ranks:
    """Compares ranks in logged steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slowest = -1  # slowest rank of the last logged step
        self._in_a_row = 0
        self._silent_until = 0.0

    def columns(self, work: float, memory: float, has_waits: bool) -> dict[str, Any]:
        """Returns the columns of a logged step. All ranks call it together.

        `work`: seconds per step; `memory`: GiB. `has_waits`: whether waits are measured and `work`
        is without them; otherwise ranks are compared by memory only.
        """
        table = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        table[dist.get_rank()] = torch.tensor([work, memory], dtype=torch.float64)
        if len(table) > 1:
            table = table.to(self.device)
            dist.all_reduce(table)
        seconds, memories = table.T.tolist()
        row: dict[str, Any] = {
            "memory_max_gib": max(memories),
            "memory_max_rank": memories.index(max(memories)),
        }
        if len(table) > 1 and has_waits:
            slowest = seconds.index(max(seconds))
            self.warn_of_slow_rank(slowest, seconds[slowest], statistics.median_low(seconds))
            row |= {"slowest_rank": slowest, "slowest_rank_seconds": seconds[slowest]}
            row["fastest_rank_seconds"] = min(seconds)
        return row

    def warn_of_slow_rank(self, rank: int, seconds: float, median: float) -> None:
        """Warns on rank 0 if the same rank was slow several times in a row."""
        slow = seconds > RATIO * median and seconds > median + SECONDS
        if not slow:
            self._in_a_row = 0
        elif rank == self._slowest:
            self._in_a_row += 1
        else:
            self._in_a_row = 1
        self._slowest = rank
        now = time.monotonic()
        if self._in_a_row >= IN_A_ROW and now >= self._silent_until and dist.get_rank() == 0:
            self._silent_until = now + PAUSE
            logger.warning(
                f"rank {rank} is slow: {seconds:.3f} s of work per step, "
                f"the median of the ranks is {median:.3f} s"
            )
