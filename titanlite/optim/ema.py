"""Exponential moving average (EMA) of the weights.

What it is: an fp32 copy of the parameters that follows them: after each optimizer step

    average += (1 - d_t) (weights - average),    d_t = min(decay, (1 + t) / (10 + t))

where t counts the steps since the average began, as a copy of the weights. The growing d_t is that
of TensorFlow's `ExponentialMovingAverage(num_updates=)`: after 10 steps the initial weights have a
share of 6e-5. With a constant `decay` the share would be decay^t, which at 0.999 is 37% after 1,000
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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.config.schema import EmaConfig
from titanlite.distributed.dtensor import local_part
from titanlite.distributed.torch_private import foreach_lerp_
from titanlite.optim.found_inf import found_inf_of


class WeightEMA:
    """The average, by parameter name; without `ema.decay` it is empty and has no state.

    Stateful: the state is the values and the number of steps followed.
    """

    def __init__(
        self, config: EmaConfig, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        """Follows the parameters of this rank's `parts`, which `optimizer` updates.

        `parts` are parallelised and have memory; the average gets their placements and devices.
        """
        self.enabled = config.decay > 0
        self.validates = self.enabled and config.validate
        self.parts = parts
        self.decay = config.decay
        self.optimizer = optimizer
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.started = False  # whether it has weights of this run, or an average from a checkpoint
        self.steps = 0  # steps followed so far
        if self.enabled:
            for part in parts:
                for name, parameter in part.named_parameters():
                    if not parameter.requires_grad:
                        continue
                    self.names.append(name)
                    self.parameters.append(parameter)
                    average = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                    self.averages.append(average)

    def start(self) -> None:
        """Copies the present weights, unless a checkpoint had an average."""
        if not self.started:
            self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Copies the present weights, as after loading a checkpoint without an average."""
        self.started = True
        self.steps = 0
        for average, weights in self._shards():
            average.copy_(weights)

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        averages = zip(self.names, self.averages, strict=True)
        return {"steps": torch.tensor(self.steps), **dict(averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.enabled:
            return
        self.started = True
        self.steps = int(state["steps"])
        for name, average in zip(self.names, self.averages, strict=True):
            # Two pipeline stages' copies of a tied embedding have the same name: both are set
            average.copy_(state[name])

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs this rank's part of each average with the parameter's.

        It looks them up in each step, because FSDP may have replaced a parameter's memory.
        """
        pairs = zip(self.averages, self.parameters, strict=True)
        return [(local_part(average), local_part(parameter)) for average, parameter in pairs]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the weights, after an optimizer step.

        If the update was withheld on the device (`found_inf` is 1), the average stays as it is.
        """
        if not self.enabled:
            return
        self.steps += 1
        share = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        shards = self._shards()
        found_inf = found_inf_of(self.optimizer)
        if found_inf is None and all(weights.dtype == torch.float32 for _, weights in shards):
            averages = [average for average, _ in shards]
            foreach_lerp_(averages, [weights for _, weights in shards], share)
            return
        # This step's share 1 - d_t on each device: parallel.cpu_offload has weights in CPU memory
        shares: dict[torch.device, Any] = {}
        for average, weights in shards:
            device = average.device
            if device not in shares:
                shares[device] = share
                if found_inf is not None:
                    shares[device] = (share * (1 - found_inf)).to(device)
            average.lerp_(weights.float(), shares[device])

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Puts the averaged weights into the model within this context.

        Afterwards everything is bit-equal to before. fp32 weights are exchanged with the average,
        which takes no memory; weights in other dtypes are copied.
        """
        copies = self._exchange([])
        try:
            yield
        finally:
            self._exchange(copies)

    @torch.no_grad()
    def _exchange(self, copies: list[Tensor]) -> list[Tensor]:
        """Exchanges average and weights; returns or restores copies of weights not in fp32."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # Reshard first: a unit that is still gathered would ignore the exchanged shards
                    module.reshard()
        made: list[Tensor] = []
        remaining = iter(copies)
        for average, weights in self._shards():
            if weights.dtype == average.dtype:
                before = weights.clone()
                weights.copy_(average)
                average.copy_(before)
            elif copies:
                weights.copy_(next(remaining))
            else:
                made.append(weights.clone())
                weights.copy_(average)
        return made
