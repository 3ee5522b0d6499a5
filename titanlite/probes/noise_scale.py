"""Gradient noise scale: the batch size beyond which larger batches help little (arXiv 1812.06162).

What it is: variance / |G|^2, the variance of the gradient of one token over the square of the true
gradient, in tokens. The mean gradient of n tokens has the expected square |G|^2 + variance / n. Two
batches in one step, of m < n tokens, give both:

    |G|^2 = (n |G_n|^2 - m |G_m|^2) / (n - m)        variance = (|G_m|^2 - |G_n|^2) / (1/m - 1/n)

The large batch is the whole step. The small one is the first local batch of each data-parallel
rank: sharded gradients are reduced over ranks before any rank could see its own, and after that
local batch their sum is in place. Both are estimates with much noise, so numerator and denominator
are averaged over measurements before the division (appendix A.1 of the paper). "Of one token"
assumes that tokens are drawn one by one; those of a sequence are alike, so the variance is that of
sequences divided by their length. Batches count targets, and the small gradient is that of a sum
over the step's targets, so it is multiplied by n / m. Here gradients are still multiplied by
float16's loss scale, which changes, so both squares are divided by its square.
Why it is here: far below the noise scale, a larger batch needs proportionally fewer steps for the
same loss; far above it, a larger batch needs more tokens for the same loss. It grows during
training, which is the reason for `training.batch_ramp`.
What it costs: on measured steps two passes over the gradients, and two all-reduces: of two squares
(16 bytes) and of one count. The host waits for nothing; the averages stay on the device until a
step is logged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.data.stream import Batch, count_targets
from titanlite.probes.layer_norms import finite, sum_of_squares

KEPT = 0.95  # of the averages at each measurement: about the last 20 count


class NoiseScale:
    """Averages of |G|^2 and the variance, in that order. Stateful."""

    optional = True  # a checkpoint may be older than the measurement

    def __init__(self, stages: Any, loss_scale: Any = None) -> None:
        """`loss_scale`: of a run in float16.

        What else it needs is checked by `rules/divides.py` and `rules/excludes.py`.
        """
        self.stages = stages
        self.loss_scale = loss_scale
        self.reset()
        self._small = self._targets = self.averages

    def reset(self) -> None:
        """Back to the state at the beginning of a run."""
        self.averages = torch.zeros(2, dtype=torch.float64, device=self.stages.mesh.device_type)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = state["averages"].to(self.averages.device)

    def before_first(self, batch: Batch) -> None:
        """Call it with the first local batch of a measured step, before the forward, which may cut
        the batch.
        """
        self._targets = self.stages.mesh.sum_counts(count_targets([batch]))

    def after_first(self) -> None:
        """Call it after the backward of that local batch, if another one follows."""
        shared = [p for p in self.stages.shared_params if p.grad is not None]
        kept = [p.grad.clone() for p in shared]
        # For the norm; the stages do it themselves at the end of the step only
        self.stages.sum_shared()
        self._small = self._square()
        for parameter, gradient in zip(shared, kept, strict=True):
            parameter.grad.copy_(gradient)

    def after_last(self, num_targets: Tensor) -> None:
        """Call it after the last backward of that step, before clipping; `num_targets`: of the
        whole step.
        """
        squares = torch.stack([self._small, self._square()])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(squares)
        if self.loss_scale:
            squares = squares / self.loss_scale.scale.double().square()
        b = self._targets.double()
        whole = num_targets.double()
        small = squares[0] * (whole / b).square()
        large = squares[1]
        gradient = (whole * large - b * small) / (whole - b)
        measured = torch.stack([gradient, (small - large) / (1 / b - 1 / whole)])
        average = KEPT * self.averages + (1 - KEPT) * measured
        # A new tensor: an asynchronous save may be reading the old one. Not finite: no targets, or
        # an overflow.
        self.averages = torch.where(measured.isfinite().all(), average, self.averages)

    def _square(self) -> Tensor:
        """This rank's part of the square of the gradient that has accumulated."""
        parameters = [
            p for part in self.stages.model_parts for p in part.parameters() if p.grad is not None
        ]
        pairs = [(p, p.grad) for p in parameters]
        return sum_of_squares(pairs, self.stages.shared_params, self._targets.device)

    def columns(self) -> dict[str, Any]:
        """The column of a logged step: in tokens; None before there is an estimate."""
        gradient, variance = self.averages.tolist()
        return {
            "noise_scale": finite(variance / gradient) if gradient > 0 and variance > 0 else None
        }
