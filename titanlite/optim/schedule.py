"""The learning rate of each step.

What it is: linear warmup, then cosine (arXiv 1608.03983), linear, warmup-stable-decay (WSD, arXiv 2404.06395) or
constant. It is a pure function of the step number, so that number is its whole state. It avoids two common mistakes:
the rate of the first step is not 0 (the warmup counts from 1), and after the last step the rate stays at its minimum (a
cosine would rise again).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from titanlite.config.schema import ScheduleConfig


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step, counted from 0, divided by the peak rate."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    begin = config.warmup_steps
    if config.name == "wsd":
        begin = max(begin, total_steps - round(config.decay_fraction * total_steps))
    # 0 at the last step with the peak rate, 1 at the last step of the run
    progress = min(1.0, max(0.0, (step + 1 - begin) / max(1, total_steps - begin)))
    if config.name == "constant":
        remaining = 1.0
    elif config.name == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        remaining = 1 - progress
    return config.min_ratio + (1 - config.min_ratio) * remaining


class Schedule:
    """Sets the learning rate of every parameter group. Stateful: its number of completed steps is in the checkpoint."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, peak_lr: float, total_steps: int) -> None:
        self.optimizer, self.config, self.peak_lr, self.total_steps = optimizer, config, peak_lr, total_steps
        self.completed = 0
        self._apply()

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        return self.peak_lr * lr_factor(self.config, self.completed, self.total_steps)

    def step(self) -> None:
        self.completed += 1
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def state_dict(self) -> dict[str, Any]:
        return {"completed": torch.tensor(self.completed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.completed = int(state["completed"])
        self._apply()
