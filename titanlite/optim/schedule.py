"""The learning rate of each step.

What it is: linear warmup, then cosine (arXiv 1608.03983), linear, warmup-stable-decay (WSD, arXiv
2404.06395; its decays: arXiv 2405.18392), constant, the inverse square root of the step (arXiv
1706.03762), or steps down. It is a pure function of the step number and has no state. Two details:
the rate of the first step is not 0 (a warmup of 0 steps means the same as one of 1), and after the
last step the rate stays at its minimum (a plain cosine would rise again).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titanlite.config.changes import milestones
from titanlite.config.schema import ScheduleConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer  # `titanlite plan --estimate` runs without torch


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of step 1, 2, ... divided by the peak rate."""
    shape = config.name
    begin = max(1, config.warmup_steps)  # last step of the warmup, at the peak rate
    if step <= begin:
        return step / begin
    if shape == "inverse_sqrt":
        return max(config.min_ratio, math.sqrt(begin / step))
    if shape == "step":
        factors = [change.value for change in milestones(config.milestones) if change.step <= step]
        return min(factors, default=1.0)
    if shape == "wsd":
        decay_steps = config.decay_steps or round(config.decay_fraction * total_steps)
        shape = config.decay
        begin = max(begin, total_steps - decay_steps)
    # 0 at the end of the warmup, 1 at the last step of the run
    progress = min(1.0, max(0.0, (step - begin) / max(1, total_steps - begin)))
    if shape == "constant":
        remaining = 1.0
    elif shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        remaining = 1 - progress
    return config.min_ratio + (1 - config.min_ratio) * remaining


class Schedule:
    """Sets the learning rate of every parameter group."""

    def __init__(
        self, optimizer: Optimizer, config: ScheduleConfig, peak_lr: float, total_steps: int
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.peak_lr = peak_lr
        self.total_steps = total_steps

    def set_lr(self, step: int) -> float:
        """Sets the rates of step 1, 2, ...; returns that of a group with `optimizer.lr`."""
        factor = lr_factor(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
        return factor * self.peak_lr
