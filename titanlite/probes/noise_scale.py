"""Gradient noise scale: the batch size beyond which larger batches help little (arXiv 1812.06162).

What it is: variance / |G|^2, the variance of the gradient of one token over the square of the true
gradient, in tokens. The mean gradient of n tokens has the expected square |G|^2 + variance / n. Two
batches in one step, of m < n tokens, give both:

    |G|^2 = (n |G_n|^2 - m |G_m|^2) / (n - m)        variance = (|G_m|^2 - |G_n|^2) / (1/m - 1/n)

The large batch is the whole step. The small batch is the first local batch of all data-parallel
ranks together: sharded gradients are reduced over ranks before any rank could see its own, and the
sum is available after that local batch. Both estimates are noisy, so numerator and denominator are
averaged over measurements before the division (appendix A.1 of the paper). "Variance of one token"
assumes that tokens are drawn one by one; the tokens of a sequence are alike, so in fact it is the
variance of sequences divided by their length. Batches count targets, and the small gradient is
divided by the step's targets, so it is multiplied by n / m. The gradients here are still multiplied
by float16's loss scale, which changes, so both squares are divided by its square.
Why it is here: far below the noise scale, a larger batch needs proportionally fewer steps for the
same loss; far above it, a larger batch needs more tokens for the same loss. It grows during
training, which is the reason for `training.batch_ramp`.
What it costs: on measured steps two passes over the gradients, and two all-reduces: one of two
squares (16 bytes) and one of a count. The host does not wait; the averages stay on the device until
a step is logged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import MetricsConfig
from titanlite.data.rows import Batch, count_targets
from titanlite.data.to_device import to_device
from titanlite.distributed.agreement import is_alone
from titanlite.distributed.dtensor import sum_of_squares, with_gradients
from titanlite.observe.metrics import Progress
from titanlite.optim.loss_scale import LossScale
from titanlite.parallel.stages import Stages
from titanlite.probes.layer_norms import finite

KEPT = 0.95  # decay of the averages per measurement: about the last 20 count


class NoiseScale:
    """Averages of |G|^2 and the variance; with `metrics.noise_scale_freq = 0` there are none.

    Stateful: the state is the two averages, in that order.
    """

    def __init__(
        self, config: MetricsConfig, stages: Stages, scaler: LossScale, progress: Progress
    ) -> None:
        """`rules/divides.py` and `excludes.py` have checked the settings that it needs."""
        self.freq = config.noise_scale_freq
        self.stages = stages
        self.scaler = scaler
        self.progress = progress
        self.device = torch.device(stages.mesh.device_type)
        self.reset()

    def reset(self) -> None:
        """Restores the state at the beginning of a run."""
        self.averages = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._small = torch.zeros((), dtype=torch.float64, device=self.device)
        self._small_targets = torch.zeros((), dtype=torch.float64, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        if self.freq == 0:
            return {}
        return {"averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.freq > 0:
            self.averages = state["averages"].to(self.averages.device)

    def _measures(self, num_batches: int) -> bool:
        """Whether this step is measured: it needs a batch that is smaller than the step."""
        return self.freq > 0 and self.progress.step % self.freq == 0 and num_batches > 1

    def before_step(self, batches: list[Batch]) -> None:
        """Counts the small batch's targets."""
        if self._measures(len(batches)):
            targets = to_device(count_targets(batches[:1]), self.device)
            self._small_targets = self.stages.mesh.sum_counts(targets)

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        """Measures if it is time; call it after each backward, before clipping.

        `i` counts the local batches; `num_targets`: the step's, over all ranks.
        """
        if not self._measures(num_batches):
            return
        if i == 0:
            self._measure_small()
        if i == num_batches - 1:
            self._measure_large(num_targets)

    def _measure_small(self) -> None:
        shared = [p for p in self.stages.shared_params if p.grad is not None]
        gradients = [parameter.grad.clone() for parameter in shared if parameter.grad is not None]
        # For this norm only: at the end of the step the stages sum the copies themselves
        self.stages.sum_shared()
        self._small = self._square()
        for parameter, gradient in zip(shared, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def _measure_large(self, num_targets: Tensor) -> None:
        squares = torch.stack([self._small, self._square()])
        if not is_alone():
            dist.all_reduce(squares)
        # The gradients still have float16's loss scale, so their squares have its square
        squares = squares / self.scaler.scale.double().square()
        m = self._small_targets.double()
        n = num_targets.double()
        small = squares[0] * (n / m).square()
        large = squares[1]
        gradient = (n * large - m * small) / (n - m)
        variance = (small - large) / (1 / m - 1 / n)
        measured = torch.stack([gradient, variance])
        average = KEPT * self.averages + (1 - KEPT) * measured
        # Assign a new tensor: an asynchronous save may be reading the old one. A measurement is not
        # finite without targets or after an overflow.
        self.averages = torch.where(measured.isfinite().all(), average, self.averages)

    def _square(self) -> Tensor:
        """Computes this rank's part of the square of the accumulated gradient."""
        gradients = with_gradients(self.stages.model_parts)
        return sum_of_squares(gradients, self.stages.shared_params, self.device)

    def columns(self) -> dict[str, Any]:
        """Returns the column of a logged step, in tokens; None before there is an estimate."""
        if self.freq == 0:
            return {}
        gradient, variance = self.averages.tolist()
        noise_scale = None
        if gradient > 0 and variance > 0:
            noise_scale = finite(variance / gradient)
        return {"noise_scale": noise_scale}
