"""After the first minute of a run: what `titanlite plan` predicted, beside what was measured.

What it is: memory and speed of the steps logged so far, next to those that the planner estimates
for this config, this number of processes and this GPU, as a line of the log and an event, which the
report shows.
Why it is here: a planner whose error nobody sees is believed too much, or not at all.
What it costs: a tenth of a second on rank 0, once. On a device that is not in the planner's table,
as on a CPU, nothing is said.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.device import device_name

logger = logging.getLogger("titanlite")
SECONDS = 60.0  # of training in this process


class PlanCheck:
    """Compares once, on rank 0."""

    def __init__(self, config: Config, llama: LlamaConfig, device: torch.device) -> None:
        self.config = config
        self.llama = llama
        self.device_name = device_name(device)
        self.begin: float | None = None  # seconds of training at the first row of this process
        self.done = dist.get_rank() != 0

    def compare(self, row: dict[str, Any]) -> None:
        """Call it with each logged row."""
        if self.done:
            return
        if self.begin is None:
            self.begin = row["seconds"]  # the steps until here compiled
        if row["seconds"] - self.begin < SECONDS:
            return
        self.done = True
        line = self._line(row)
        if line:
            logger.info(line, extra={"event": "plan"})

    def _line(self, row: dict[str, Any]) -> str:
        """The comparison; empty for a device that the planner does not know, or without tools."""
        if not find_spec("titanlite.tools"):
            return ""
        from titanlite.tools.plan.check import comparison

        return comparison(self.config, self.llama, dist.get_world_size(), self.device_name, row)
