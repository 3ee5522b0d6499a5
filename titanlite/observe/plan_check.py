"""After the first minute of a run: what `titanlite plan` predicted, beside what was measured.

What it is: memory and speed of the last logged steps, next to those that the planner estimates for
this config, this number of processes and this GPU, as a line of the log and an event, which the
report shows.
Why it is here: with its error beside it, a prediction is believed as much as it deserves.
What it costs: a tenth of a second on rank 0, once. On a device that is not in the planner's table,
as on a CPU, nothing is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("titanlite")
SECONDS = 60.0  # of training in this process
Row = dict[str, Any]  # of metrics.jsonl


class PlanCheck:
    """Compares once, on rank 0."""

    def __init__(self, comparison: Callable[[Row], str]) -> None:
        """`comparison`: from a logged row to a line; an empty one is not logged."""
        self.comparison = comparison
        self.begin: float | None = None  # seconds of training at the first row of this process
        self.done = dist.get_rank() != 0

    def compare(self, row: Row) -> None:
        """Call it with each logged row."""
        if self.done:
            return
        if self.begin is None:
            self.begin = row["seconds"]  # the steps until here compiled
        if row["seconds"] - self.begin < SECONDS:
            return
        self.done = True
        try:
            line = self.comparison(row)
        except Exception as error:  # no comparison ends a run
            logger.warning("plan: cannot be compared with this run: %s", error)
            return
        if line:
            logger.info(line, extra={"event": "plan"})
