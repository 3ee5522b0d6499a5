"""What a checkpoint holds, as Stateful objects: things with `state_dict` and `load_state_dict`.

What it is: the model and the optimizer here; schedule, data stream and progress are Stateful themselves. Keys are
plain parameter names and values are DTensors, so DCP can store each process's shard and hand any other layout its
part. Everything is a tensor: nothing in a checkpoint has to be unpickled to be used.
State is fetched when it is saved, never kept: a shard that is padded before the first forward may be another
tensor after it.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class ModelState:
    """Parameters by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerState:
    """Moments and step counts by parameter name: `state.<parameter>.exp_avg` and so on.

    Learning rate, betas and weight decay are the config's, and are not stored.
    """

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def _all(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._all().items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, {**self._all(), **state}, options=self.options)


class RandomState:
    """torch's and Python's generators. All processes hold the same, so one copy serves any number of them."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, _ = random.getstate()
        # A run that moves between CPU and CUDA finds the same keys; zeros stand for no CUDA generator.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.zeros(16, dtype=torch.uint8)
        python = torch.tensor([version, *numbers], dtype=torch.int64)
        return {"torch": torch.get_rng_state(), "cuda": cuda, "python": python}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        version, *numbers = state["python"].tolist()
        random.setstate((version, tuple(numbers), None))
        if torch.cuda.is_initialized() and state["cuda"].any():
            torch.cuda.set_rng_state(state["cuda"])
