"""Compares `titanlite plan`'s prediction with the run, once, after its first minute.

What it is: memory and speed of the last logged steps, next to the planner's estimates for this
config, number of processes and GPU, as a line of the log and an event, which the report shows.
Why it is here: users can trust a prediction as far as its measured error shows.
What it costs: a tenth of a second on rank 0, once. For a device that is not in the planner's table,
such as a CPU, nothing is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("titanlite")
SECONDS = 60.0  # training time in this process before the comparison
Row = dict[str, Any]  # a row of metrics.jsonl


class PlanCheck:
    """Compares a run with its plan once, on rank 0."""

    def __init__(self, comparison: Callable[[Row], str]) -> None:
        """`comparison` turns a logged row into a line; an empty line is not logged."""
        self.comparison = comparison
        self.begin: float | None = None  # training seconds at this process's first row
        self.done = dist.get_rank() != 0

    def compare(self, row: Row) -> None:
        """Compares once it is time; call it with each logged row."""
        if self.done:
            return
        if self.begin is None:
            self.begin = row["seconds"]  # earlier steps compiled, so they do not count
        if row["seconds"] - self.begin < SECONDS:
            return
        self.done = True
        try:
            line = self.comparison(row)
        except Exception as error:  # a failed comparison must not end the run
            logger.warning("plan: cannot be compared with this run: %s", error)
            return
        if line:
            logger.info(line, extra={"event": "plan"})
