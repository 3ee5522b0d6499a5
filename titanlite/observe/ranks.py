"""Compares ranks: finds the slowest, and the one that needs the most memory.

What it is: each rank's seconds of work per step, without the time spent waiting for others, and its
peak memory. All ranks take equally long for a step, because each waits for the slowest; only the
time without waits differs, so seconds are compared only with `metrics.rank_waits`. A rank that is
always the slowest has a throttled or shared device, slow storage, or more work, as in a pipeline of
unequal stages.
What it costs: one all-reduce of 16 bytes per rank, in logged steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def compare_ranks(
    device: torch.device, work: float, memory: float, has_waits: bool
) -> dict[str, Any]:
    """Returns the columns of a logged step. All ranks call it together.

    `work`: seconds per step; `memory`: GiB. `has_waits`: whether waits are measured and `work` is
    without them; otherwise ranks are compared by memory only.
    """
    table = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor([work, memory], dtype=torch.float64)
    if len(table) > 1:
        table = table.to(device)
        dist.all_reduce(table)
    seconds, memories = table.T.tolist()
    row: dict[str, Any] = {
        "memory_max_gib": max(memories),
        "memory_max_rank": memories.index(max(memories)),
    }
    if len(table) > 1 and has_waits:
        row["slowest_rank"] = seconds.index(max(seconds))
        row["slowest_rank_seconds"] = max(seconds)
        row["fastest_rank_seconds"] = min(seconds)
    return row
