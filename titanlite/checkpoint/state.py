"""The state in a checkpoint, as Stateful objects of torch.distributed.checkpoint (DCP), which have
`state_dict` and `load_state_dict`.

What it is: model, optimizer and random generators; data stream and progress are Stateful
themselves. Keys are plain parameter names, and sharded tensors are DTensors, whose placements say
which part of the whole tensor a process holds: so each process can write its own part, and read any
part in another layout (`planner.py`). All values are tensors, so nothing has to be unpickled. A
part of the run that is switched off has an empty state, and is left out.
State is fetched for each save and never kept, because FSDP may replace a parameter's tensor at the
first forward.
What it costs: only views of the tensors; before the optimizer's first step, a save or load
allocates its state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError, reason_of

# Part -> name -> Tensor or DTensor
State = dict[str, dict[str, Any]]


@runtime_checkable
class OptionalStateful(Protocol):
    """A Stateful that older checkpoints may lack; `reset` then restores its initial state."""

    # Not a subclass of torch's Stateful: below Python 3.12, isinstance checks of it would then fail
    # (findings/stateful_protocol_of_typing.sh)
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def reset(self) -> None: ...


def switched_on(states: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Selects the parts that have a state now: those that `dcp.save` and `dcp.load` get."""
    return {name: part for name, part in states.items() if part.state_dict()}


def state_of(parts: Mapping[str, Stateful]) -> State:
    """Collects the state of each part, as `dcp.save` does: views of its tensors, not copies."""
    return {name: part.state_dict() for name, part in parts.items()}


def every_name(name: str) -> bool:
    """Selects all parameters."""
    return True


class ModelState(Stateful):
    """Parameters by name, over all parts of the model that this process holds.

    It has the parameters whose name `selects` accepts: with adapters (`parallel/lora.py`) only the
    adapters are saved, because the other weights stay equal to those in their file.
    """

    def __init__(
        self, parts: Sequence[nn.Module], selects: Callable[[str], bool] = every_name
    ) -> None:
        self.parts = parts
        self.selects = selects

    def state_dict(self) -> dict[str, Any]:
        state = {}
        for part in self.parts:
            for name, value in part.state_dict().items():
                if self.selects(name):
                    state[name] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            selected = {name: state[name] for name in part.state_dict() if self.selects(name)}
            part.load_state_dict(selected, strict=False)


class FrozenWeights(Stateful):
    """The fingerprint of the frozen weights under adapters; no checkpoint holds these weights.

    In runs without adapters it has no state.
    """

    def __init__(self, path: str, fingerprint: str) -> None:
        """`path`: the file of the weights; `fingerprint`: hexadecimal, empty without adapters."""
        self.path = path
        self.fingerprint = bytes.fromhex(fingerprint)

    def state_dict(self) -> dict[str, Any]:
        if not self.fingerprint:
            return {}
        return {"fingerprint": torch.tensor(list(self.fingerprint), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if bytes(state["fingerprint"].tolist()) != self.fingerprint:
            raise ConfigError(
                f"checkpoint.initial_load = {self.path!r}: are not the weights that this run began "
                "with, which its adapters are added to; expected those"
            )


class OptimizerState(Stateful):
    """Moments and step counts by parameter name: `state.<parameter>.exp_avg` and so on.

    Learning rate, betas and weight decay come from the config and are not stored. torch's
    `get_optimizer_state_dict(flatten_optimizer_state_dict=True)` gives the same names and tensors,
    but also these, with AdamW as eleven Python values per parameter: DCP would pickle each.
    """

    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.optimizer = optimizer

    def _parameters(self) -> list[tuple[str, Tensor]]:
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # An evaluation may leave it gathered, but optimizer state belongs to shards
                    module.reshard()
        trained: list[tuple[str, Tensor]] = []
        for part in self.parts:
            trained += [(name, p) for name, p in part.named_parameters() if p.requires_grad]
        return trained

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._values():
            value.copy_(state[name])

    def _values(self) -> list[tuple[str, Any]]:
        """Lists the state with its names: one for both copies of a tied embedding, if one process
        has the first and the last stage of a pipeline.
        """
        if not self.optimizer.state:
            self._allocate()
        # Copied into a plain dict: a parameter without state must be an error
        state = dict(self.optimizer.state)
        return [
            (f"state.{name}.{key}", value)
            for name, p in self._parameters()
            for key, value in state[p].items()
        ]

    @torch.no_grad()
    def _allocate(self) -> None:
        """Takes a step that changes no parameter, because the first step allocates the state."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for _, parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self.optimizer.state.values():
            if "step" in state:  # the step that created the state does not count
                state["step"].zero_()


class RandomState(Stateful):
    """The random generators of torch and Python.

    They are equal on all processes, so one copy is saved for all.
    """

    def state_dict(self) -> dict[str, Any]:
        version, numbers, _ = random.getstate()
        # The keys are the same on CPU and CUDA, so that a run can move between them: without a
        # CUDA generator, zeros take its place
        cuda = torch.zeros(16, dtype=torch.uint8)
        if torch.cuda.is_initialized():
            cuda = torch.cuda.get_rng_state()
        python = torch.tensor([version, *numbers], dtype=torch.int64)
        return {"torch": torch.get_rng_state(), "cuda": cuda, "python": python}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the generators. Raises CorruptCheckpoint if one does not accept its state."""
        try:
            torch.set_rng_state(state["torch"])
            version, *numbers = state["python"].tolist()
            random.setstate((version, tuple(numbers), None))
            if torch.cuda.is_initialized() and state["cuda"].any():
                torch.cuda.set_rng_state(state["cuda"])
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise CorruptCheckpoint(
                f"not a valid state of random generators ({reason_of(error)})"
            ) from None
