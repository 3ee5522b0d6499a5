"""The learning rate of each step.

What it is: linear warmup, then cosine (arXiv 1608.03983), linear, warmup-stable-decay (WSD, arXiv 2404.06395) or
constant. It is a pure function of the step number and has no state. Two details: the rate of the first step is not 0
(the warmup counts from 1), and after the last step the rate stays at its minimum (a plain cosine would rise again).
"""

from __future__ import annotations

import math

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
    """Sets the learning rate of every parameter group."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, peak_lr: float, total_steps: int) -> None:
        self.optimizer, self.config, self.peak_lr, self.total_steps = optimizer, config, peak_lr, total_steps

    def set_lr(self, step: int) -> float:
        """Sets and returns the learning rate of optimizer step 1, 2, ..., `total_steps`."""
        lr = self.peak_lr * lr_factor(self.config, step - 1, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
