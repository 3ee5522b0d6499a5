"""Exponential moving average (EMA) of the weights.

What it is: an fp32 copy of the parameters that follows them: after each optimizer step

    average += (1 - d_t) (weights - average),    d_t = min(decay, (1 + t) / (10 + t))

where t counts the steps since the average began, as a copy of the weights. The growing d_t is that
of TensorFlow's `ExponentialMovingAverage(num_updates=)`: the first weights have a share of 6e-5
after 10 steps. With a constant `decay` they would have decay^t, which at 0.999 is 37% after 1,000
steps.
Why it is here: averaged weights have the loss of a lower learning rate without its slower progress
(arXiv 1803.05407, 2306.03241), so a run can be judged, and its weights used, before the learning
rate has decayed.
What it costs: 4 bytes per parameter, sharded as the parameters are, and the same in each
checkpoint; per step one pass that reads weights and average and writes the average. No
communication, and nothing is read by the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.config.schema import EmaConfig
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.torch_private import foreach_lerp_


class WeightEMA:
    """The average, by parameter name.

    Stateful: its values and the number of steps that it has followed.
    """

    # Absent from a checkpoint: the average begins with the weights of that checkpoint
    optional = True

    def __init__(
        self, parts: list[Any], config: EmaConfig, optimizer: torch.optim.Optimizer
    ) -> None:
        """Follows the parameters of this rank's `parts` from `start` on, at each step of
        `optimizer`.

        `parts` are parallelised and have memory; the average gets their placements and devices.
        """
        self.parts = parts
        self.decay = config.decay
        named = [named for part in parts for named in part.named_parameters()]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.averages: list[Any] = [
            torch.zeros_like(p, dtype=torch.float32) for p in self.parameters
        ]
        self.steps = -1  # followed so far; not started
        optimizer.register_step_post_hook(self._follow)

    def start(self) -> None:
        """Begins with the present weights, unless a checkpoint has been loaded."""
        if self.steps < 0:
            self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Begins with the present weights: also those of a checkpoint that has no average."""
        self.steps = 0
        for average, weights in self._shards():
            average.copy_(weights)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": torch.tensor(self.steps),
            **dict(zip(self.names, self.averages, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        for name, average in zip(self.names, self.averages, strict=True):
            # Also into a second copy of a tied embedding, which has the same name
            average.copy_(state[name])

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of each average and of its parameter, whose memory FSDP may have
        replaced.
        """
        return [
            (local_part(a), local_part(p))
            for a, p in zip(self.averages, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def _follow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step.

        If its update was withheld on the device (`found_inf` is 1), the average stays as it is.
        """
        # a step that allocates the optimizer's state, before a checkpoint is loaded
        if self.steps < 0:
            return
        self.steps += 1
        share: Any = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        found_inf = getattr(optimizer, "found_inf", None)
        shards = self._shards()
        if found_inf is None and all(weights.dtype == torch.float32 for _, weights in shards):
            foreach_lerp_(
                [average for average, _ in shards], [weights for _, weights in shards], share
            )
            return
        shares: dict[torch.device, Any] = {}  # the product below is copied once to each device
        for average, weights in shards:
            if found_inf is not None and average.device not in shares:
                shares[average.device] = (share * (1 - found_inf)).to(average.device)
            average.lerp_(weights.float(), shares.get(average.device, share))

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """A context in which the model computes with the averaged weights; afterwards all is
        bit-equal to before.

        fp32 weights are exchanged with the average and take no memory; a copy is made of weights in
        other dtypes.
        """
        copies = self._exchange([])
        try:
            yield
        finally:
            self._exchange(copies)

    @torch.no_grad()
    def _exchange(self, copies: list[Tensor]) -> list[Tensor]:
        """Exchanges average and weights; of weights that are not fp32, restores or returns
        `copies`.
        """
        for module in (module for part in self.parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                # What is still gathered would be computed with instead of the shards
                module.reshard()
        made = []
        kept = iter(copies)
        for average, weights in self._shards():
            if weights.dtype == average.dtype:
                before = weights.clone()
                weights.copy_(average)
                average.copy_(before)
            elif copies:
                weights.copy_(next(kept))
            else:
                made.append(weights.clone())
                weights.copy_(average)
        return made
