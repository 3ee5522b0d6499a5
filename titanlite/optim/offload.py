"""`parallel.optimizer_offload`: the optimizer's state in CPU memory, weights and all computation on
the GPU.

What it is: between steps the moments are in pinned CPU memory. `step` takes a few parameters at a
time: their moments are copied to the GPU, the optimizer updates these parameters, and the moments
are copied back. It works with every optimizer that updates each parameter by itself, and the update
is the same, bit for bit.
Why it is here: AdamW's moments are half of the memory of a training state, and are used once per
step. ZeRO-Offload (arXiv 2101.06840) computes the update on the CPU instead: that transfers half as
much, but needs a second copy of the parameters and an optimizer for CPUs. `parallel.cpu_offload`
moves everything, parameters too.
What it costs: for AdamW in fp32, 8 bytes per parameter are copied in each direction in every step,
however large its batch is: docs/precision.md compares that with the computation. On the GPU 8 bytes
for each of the PIECE_NUMEL parameters at a time, or for the parameters of the largest tensor.
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

PIECE_NUMEL = 1 << 26  # parameters whose state is on the device at a time
Piece = list[tuple[dict[str, Any], list[Tensor]]]  # a group, and some of its parameters


class OffloadedOptimizer(torch.optim.Optimizer):
    """`inner`, with its state in CPU memory.

    It shares the parameter groups; hooks are those of this object.
    """

    honours_found_inf = True  # see stability.py; the inner optimizer does so

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        inner: Any = self.inner
        if hasattr(self, "found_inf"):
            inner.found_inf = self.found_inf
        for piece in self._pieces():
            parameters = [parameter for _, some in piece for parameter in some]
            inner.param_groups = [{**group, "params": some} for group, some in piece]
            inner.state = defaultdict(
                dict, {p: _on_device(self.state[p], p) for p in parameters if p in self.state}
            )
            inner.step()
            for parameter in parameters:
                for name, value in inner.state.get(parameter, {}).items():
                    self._keep(parameter, name, value)
        inner.param_groups = self.param_groups
        inner.state = defaultdict(dict)

    def _pieces(self) -> Iterator[Piece]:
        """All groups and their parameters, in pieces of up to PIECE_NUMEL numbers or of one
        parameter.
        """
        piece: Piece = []
        count = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                numel = local_part(parameter).numel()
                if piece and count + numel > PIECE_NUMEL:
                    yield piece
                    piece = []
                    count = 0
                if not piece or piece[-1][0] is not group:
                    piece.append((group, []))
                piece[-1][1].append(parameter)
                count += numel
        if piece:
            yield piece

    def _keep(self, parameter: Tensor, name: str, value: Tensor) -> None:
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
            if value.is_cuda:
                local = local_part(state[name])
                local.data = local.pin_memory()


def _on_device(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """A copy on the parameter's device.

    Also on a CPU, so that what is tested there is what runs on a GPU.
    """
    return {
        name: value.to(parameter.device, non_blocking=True, copy=True) if value.ndim else value
        for name, value in state.items()
    }
