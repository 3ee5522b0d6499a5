"""Dynamic loss scaling: training in float16 on GPUs that have no bfloat16 (Turing, Volta).

What it is: float16 has 5 exponent bits, so a gradient below 6e-8 becomes zero, and one above 65,504
infinity. The loss is multiplied by a scale before the backward, and the gradients are divided by it
before clipping (arXiv 1710.03740). If the norm of all gradients is not finite, the update is
withheld and the scale is halved; after `training.loss_scale_growth` good steps in a row it is
doubled. The scale is a power of two, so multiplying and dividing by it rounds nothing.
Why it is here: the largest scale that does not overflow changes during training. Scaling cannot
help if the forward overflows; then the scale falls to 1, and the step counts as bad, as in any
other dtype (`stability.py`).
What it costs: one pass over the gradients, to divide them. Nothing is read by the host: scale,
decision and counts stay on the device, and are the same on all ranks because the norm is that of
the whole gradient.
What stays fp32: parameters, gradients and their sums over ranks, moments, RoPE and the loss; and,
inside kernels, norms, softmax and the sums of matrix products. The residual stream is float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import TrainingConfig
from titanlite.optim.clip import scale_gradients
from titanlite.optim.found_inf import require_withholding, withhold

LOWEST = 1.0
HIGHEST = 2.0**24


class LossScale:
    """The scale of a run in float16; in other dtypes it is 1, never changes, and has no state.

    Stateful: the state is the scale, the good steps since its last change, and the number of
    withheld updates.
    """

    def __init__(
        self, config: TrainingConfig, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        """`config.compute_dtype` must be resolved: not auto.

        Raises ConfigError if the optimizer cannot withhold an update.
        """
        self.enabled = config.compute_dtype == "float16"
        if self.enabled:
            require_withholding(optimizer, "training.compute_dtype = float16")
        self.optimizer = optimizer
        self.growth = config.loss_scale_growth
        self.first = config.loss_scale if self.enabled else 1.0
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Restores the state at the beginning of a run."""
        self.scale = torch.tensor(self.first, dtype=torch.float32, device=self.device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        # Whether this step overflowed because of the scale, which has then been lowered
        self.tolerated = torch.zeros((), dtype=torch.bool, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.state_dict().items():
            setattr(self, name, state[name].to(value.device))

    def unscale(self) -> None:
        """Divides the gradients by the scale, after the last backward of a step."""
        if not self.enabled:
            return
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        scale_gradients(parameters, 1 / self.scale)

    def judge(self, grad_norm: Tensor) -> None:
        """Withholds the update if the gradient has overflowed, and chooses the next step's scale.

        `grad_norm`: the norm of the whole gradient, an fp32 scalar on the device, NaN or infinite
        after an overflow. It is the same on all ranks, so all decide alike.
        """
        if not self.enabled:
            return
        overflow = ~grad_norm.isfinite()
        withhold(self.optimizer, overflow)
        # Assign new tensors: an asynchronous save may still be reading the old ones.
        self.tolerated = overflow & (self.scale > LOWEST)
        self.skipped = self.skipped + overflow
        good_steps = torch.where(overflow, 0, self.good_steps + 1)
        grows = good_steps >= self.growth
        grown = torch.where(grows, 2 * self.scale, self.scale)
        self.scale = torch.where(overflow, self.scale / 2, grown).clamp(LOWEST, HIGHEST)
        self.good_steps = torch.where(grows, 0, good_steps)

    def columns(self) -> dict[str, Any]:
        """Returns columns of a logged step: the next step's scale, and the updates withheld so far.

        Waits for the device.
        """
        if not self.enabled:
            return {}
        scale, skipped = torch.stack([self.scale, self.skipped]).tolist()
        return {"loss_scale": scale, "skipped_steps": int(skipped)}
