"""AdamW whose moments, or whose parameters, are not fp32.

What it is: the same update (arXiv 1711.05101), computed in fp32; what is kept between the steps is rounded to the dtype
of the moments and of the parameters. torch's own wants one dtype for all.
What it costs: with bfloat16 moments 4 bytes per parameter less, with bfloat16 parameters (and so gradients) another 4.
In exchange numbers lose digits at every step. A moment changes by some per cent at once, so its 8 bits matter little;
with beta2 above 0.99 the second one would stand still. A parameter changes by less than 1/256 of itself at most steps,
and then not at all: learning is slower, and more so at small learning rates. Time: a dozen kernels for each 32 million
numbers, where the fused one has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PIECE = 1 << 25  # numbers whose fp32 copies are in memory at a time


class LowPrecisionAdamW(torch.optim.Optimizer):
    """Parameters in any dtype, moments in `dtype`; otherwise as torch.optim.AdamW, states by the same names."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not (state := self.state[parameter]):
                    state["step"] = torch.zeros(())  # on the CPU: reading it waits for nothing
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=self.dtype)
                state["step"] += 1
            for piece in _pieces(parameters):
                self._update(piece, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        kept = [_local(parameters), _local(s["exp_avg"] for s in states), _local(s["exp_avg_sq"] for s in states)]
        weights, first, second = ([tensor.float() for tensor in tensors] for tensors in kept)
        gradients = [gradient.float() for gradient in _local(p.grad for p in parameters if p.grad is not None)]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        steps = float(states[0]["step"])
        divisor = torch._foreach_sqrt(second)
        torch._foreach_div_(divisor, (1 - beta2**steps) ** 0.5)
        torch._foreach_add_(divisor, group["eps"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, first, divisor, -group["lr"] / (1 - beta1**steps))
        for tensors, computed in zip(kept, (weights, first, second), strict=True):
            torch._foreach_copy_(tensors, computed)  # rounds; nothing where both are the same fp32 tensor


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of them, not copies."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _pieces(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Some parameters at a time: as many as have PIECE numbers, or one that has more."""
    piece: list[Tensor] = []
    count = 0
    for parameter in parameters:
        if piece and count + parameter.numel() > PIECE:
            yield piece
            piece, count = [], 0
        piece.append(parameter)
        count += parameter.numel()
    if piece:
        yield piece
