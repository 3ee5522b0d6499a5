"""AdamW for moments and parameters of different dtypes: one bfloat16, the other fp32.

What it is: the update of torch.optim.AdamW (arXiv 1711.05101), computed in fp32. Between steps,
moments and parameters are stored in their own dtypes.
Why it is here: torch.optim.AdamW requires one dtype for parameters and moments. With both in
bfloat16 its fused implementation computes the same bits in one kernel (`optimizer.py`).
What it costs: bfloat16 moments save 4 bytes per parameter, and bfloat16 parameters (and so
gradients) another 4. Every step rounds. A moment changes by several per cent in a step, so rounding
it to 8 significant bits matters little; with beta2 above 0.99 the change of the second moment would
be lost in rounding. An update smaller than 1/512 to 1/256 of a parameter (depending on its
mantissa) is lost, which matters most for small learning rates. Time: a dozen operations for each 32
million numbers, of several kernels each; the fused AdamW needs one pass. If updates can be withheld
(`found_inf.py`), it also needs copies of 32 million weights and moments, and three more kernels for
each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.distributed import torch_private
from titanlite.distributed.dtensor import local_gradient, local_part
from titanlite.optim.found_inf import found_inf_of

CHUNK_NUMEL = 1 << 25  # numbers whose fp32 copies are in memory at a time


class Piece(NamedTuple):
    """The tensors of one update: those of one or more parameters, or a part of one's."""

    weights: list[Tensor]
    averages: list[Tensor]  # first moments
    squares: list[Tensor]  # second moments
    gradients: list[Tensor]


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with moments in `dtype` and parameters in any dtype.

    Its state has the same keys as torch.optim.AdamW's.
    """

    honours_found_inf = True  # see found_inf.py

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        weight_decay: float = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf = found_inf_of(self)  # a scalar on the device; 1: change nothing
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self._begin_state(parameter)
            if found_inf is None:
                self._step(group, parameters)
            else:
                self._step_unless(found_inf, group, parameters)

    def _begin_state(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros(())  # on the CPU: reading it does not wait for a GPU
        state["exp_avg"] = torch.zeros_like(parameter, dtype=self.dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.dtype)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self.state[parameter]["step"] += 1
        steps = float(self.state[parameters[0]]["step"])
        for piece in self._pieces(parameters):
            _update(piece, steps, group)

    def _step_unless(
        self, found_inf: Tensor, group: dict[str, Any], parameters: list[Tensor]
    ) -> None:
        """Takes a step that changes nothing if the scalar `found_inf` is 1; no host sync."""
        for parameter in parameters:  # only the device knows the number of updates
            state = self.state[parameter]
            state["step"] = state["step"].to(found_inf.device)
        counts = [self.state[parameter]["step"] for parameter in parameters]
        torch_private.foreach_add_(counts, (found_inf == 0).to(counts[0].dtype))
        for piece in self._pieces(parameters):
            _update_unless(found_inf > 0, piece, counts[0].double(), group)

    def _pieces(self, parameters: list[Tensor]) -> Iterator[Piece]:
        """Yields pieces of up to CHUNK_NUMEL numbers."""
        piece = Piece([], [], [], [])
        count = 0
        for parameter in parameters:
            for tensors in self._split(parameter):
                numel = tensors[0].numel()
                if piece.weights and count + numel > CHUNK_NUMEL:
                    yield piece
                    piece = Piece([], [], [], [])
                    count = 0
                for column, tensor in zip(piece, tensors, strict=True):
                    column.append(tensor)
                count += numel
        if piece.weights:
            yield piece

    def _split(self, parameter: Tensor) -> list[tuple[Tensor, ...]]:
        """Splits weight, moments and gradient into parts of up to CHUNK_NUMEL numbers."""
        state = self.state[parameter]
        local = [
            local_part(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])
        ]
        local.append(local_gradient(parameter))
        if not all(
            tensor.is_contiguous() for tensor in local
        ):  # only a contiguous tensor can be split as one row
            return [tuple(local)]
        parts = [tensor.view(-1).split(CHUNK_NUMEL) for tensor in local]
        return list(zip(*parts, strict=True))


def _update(piece: Piece, steps: float | Tensor, group: dict[str, Any]) -> None:
    """Makes one AdamW update in place. `steps`: a float, or a float64 scalar on the device."""
    beta1, beta2 = group["betas"]
    # `float` copies tensors of other dtypes, and returns fp32 tensors themselves
    w, m, v, g = ([tensor.float() for tensor in tensors] for tensors in piece)
    torch_private.foreach_lerp_(m, g, 1 - beta1)
    torch_private.foreach_mul_(v, beta2)
    torch_private.foreach_addcmul_(v, g, g, 1 - beta2)
    divisor = torch_private.foreach_sqrt(v)
    torch_private.foreach_div_(divisor, (1 - beta2**steps) ** 0.5)
    torch_private.foreach_add_(divisor, group["eps"])
    torch_private.foreach_mul_(w, 1 - group["lr"] * group["weight_decay"])
    # addcdiv takes a Python number as its factor: the host would wait to read it from `steps`
    if isinstance(steps, Tensor):
        torch_private.foreach_mul_(divisor, 1 - beta1**steps)
        torch_private.foreach_addcdiv_(w, m, divisor, -group["lr"])
    else:
        torch_private.foreach_addcdiv_(w, m, divisor, -group["lr"] / (1 - beta1**steps))
    stored = (piece.weights, piece.averages, piece.squares)
    for tensors, computed in zip(stored, (w, m, v), strict=True):
        if tensors[0].dtype != torch.float32:  # fp32 tensors were updated in place
            torch_private.foreach_copy_(tensors, computed)


def _update_unless(withheld: Tensor, piece: Piece, steps: Tensor, group: dict[str, Any]) -> None:
    """Makes an AdamW update that changes nothing if the scalar `withheld` is true; no host sync."""
    stored = (piece.weights, piece.averages, piece.squares)
    weights, averages, squares = ([tensor.clone() for tensor in tensors] for tensors in stored)
    _update(Piece(weights, averages, squares, piece.gradients), steps, group)
    for tensors, computed in zip(stored, (weights, averages, squares), strict=True):
        chosen = []
        for old, new in zip(tensors, computed, strict=True):
            chosen.append(torch.where(withheld, old, new))
        torch_private.foreach_copy_(tensors, chosen)
