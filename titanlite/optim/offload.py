"""`parallel.optimizer_offload`: keeps the optimizer's state in CPU memory, computes on the GPU.

What it is: between steps the moments are in pinned CPU memory. `step` takes a few parameters at a
time: their moments are copied to the GPU, the optimizer updates these parameters, and the moments
are copied back. It works with every optimizer that updates each parameter by itself, and the update
is the same, bit for bit.
Why it is here: AdamW's moments are half of the memory of a training state, and are used once per
step. ZeRO-Offload (arXiv 2101.06840) computes the update on the CPU instead: that transfers half as
much, but needs a second copy of the parameters and an optimizer for CPUs. `parallel.cpu_offload`
moves everything, parameters too.
What it costs: for AdamW in fp32, 8 bytes per parameter are copied in each direction in every step,
for any batch size: docs/precision.md compares that with the computation. GPU memory: 8 bytes for
each of PIECE_NUMEL parameters, or for the parameters of the largest tensor.
Copies and updates are in one stream, so they do not overlap, and the host does not wait; before it
reads the state, to save it, it waits for the device (`Metrics.paused`). torch's allocator of pinned
memory rounds each tensor up to a power of two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titanlite.distributed.dtensor import local_part
from titanlite.optim.found_inf import found_inf_of, set_found_inf

PIECE_NUMEL = 1 << 26  # parameters whose state is on the device at a time
ParameterGroup = dict[str, Any]  # as in torch.optim


class OffloadedOptimizer(torch.optim.Optimizer):
    """Wraps the optimizer `inner` and keeps its state in CPU memory.

    Both share the parameter groups. Register hooks on this object.
    """

    honours_found_inf = True  # see found_inf.py; the inner optimizer honours it

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        set_found_inf(self.inner, found_inf_of(self))
        for groups in pieces(self.param_groups):
            parameters = [parameter for group in groups for parameter in group["params"]]
            # In this call the inner optimizer sees only these parameters
            self.inner.param_groups = groups
            self.inner.state = defaultdict(dict)
            for parameter in parameters:
                if parameter in self.state:
                    self.inner.state[parameter] = _on_device(self.state[parameter], parameter)
            self.inner.step()
            for parameter in parameters:
                for name, value in self.inner.state.get(parameter, {}).items():
                    self._store(parameter, name, value)
        self.inner.param_groups = self.param_groups
        self.inner.state = defaultdict(dict)

    def _store(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Copies a part of a parameter's state to CPU memory.

        Step counts and other scalars stay where they are.
        """
        state = self.state[parameter]
        if not value.ndim:
            state[name] = value
        elif name in state:
            local_part(state[name]).copy_(local_part(value), non_blocking=True)
        else:
            state[name] = value.to("cpu", copy=True)
            if value.is_cuda:  # `data`, since a DTensor has no method that pins its part
                local = local_part(state[name])
                local.data = local.pin_memory()


def pieces(groups: list[ParameterGroup]) -> Iterator[list[ParameterGroup]]:
    """Splits the groups: each piece has up to PIECE_NUMEL numbers, or a single parameter."""
    piece: list[ParameterGroup] = []
    count = 0
    for group in groups:
        in_piece = False  # whether the piece has this group
        for parameter in group["params"]:
            numel = local_part(parameter).numel()
            if piece and count + numel > PIECE_NUMEL:
                yield piece
                piece = []
                count = 0
                in_piece = False
            if not in_piece:
                piece.append({**group, "params": []})
                in_piece = True
            piece[-1]["params"].append(parameter)
            count += numel
    if piece:
        yield piece


def _on_device(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Copies a state to the parameter's device; scalars stay where they are.

    It copies on a CPU too, so that tests there run the same code as a GPU.
    """
    copies = dict(state)
    for name, value in state.items():
        if value.ndim:
            copies[name] = value.to(parameter.device, non_blocking=True, copy=True)
    return copies
