"""AdamW with moments or parameters in bfloat16.

What it is: the update of torch.optim.AdamW (arXiv 1711.05101), computed in fp32. Between steps,
moments and parameters are stored in their own dtypes.
Why it is here: torch.optim.AdamW requires one dtype for parameters and moments.
What it costs: bfloat16 moments save 4 bytes per parameter, and bfloat16 parameters (and so
gradients) another 4. Every step rounds. A moment changes by several per cent in a step, so rounding
it to 8 significant bits matters little; with beta2 above 0.99 the change of the second moment would
be lost in rounding. An update smaller than 1/512 to 1/256 of a parameter (depending on its
mantissa) is lost, which matters most for small learning rates. Time: a dozen kernels for each 32
million numbers; the fused AdamW needs one. Where updates can be withheld (`found_inf`, see
`stability.py`), copies of 32 million weights and moments, and three kernels more for each
parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titanlite.distributed import torch_private
from titanlite.distributed.dtensor import local_part

Columns = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
CHUNK_NUMEL = 1 << 25  # numbers whose fp32 copies are in memory at a time


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with moments in `dtype` and parameters in any dtype.

    Its state has the names of torch.optim.AdamW's.
    """

    honours_found_inf = True  # see stability.py

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found: Tensor | None = getattr(self, "found_inf", None)  # on the device; 1: change nothing
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    # On the CPU, so that reading it does not wait for a GPU
                    state["step"] = torch.zeros(())
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=self.dtype)
                if found is None:
                    state["step"] += 1
                elif state["step"].device != found.device:  # where the number of updates is known
                    state["step"] = state["step"].to(found.device)
            if parameters and found is None:
                steps = float(self.state[parameters[0]]["step"])
                for piece in self._pieces(parameters):
                    _update(*piece, steps, group)
            elif parameters and found is not None:
                counts = [self.state[parameter]["step"] for parameter in parameters]
                torch_private.foreach_add_(counts, (found == 0).to(counts[0].dtype))
                for piece in self._pieces(parameters):
                    _update_unless(found > 0, piece, counts[0].double(), group)

    def _pieces(self, parameters: list[Tensor]) -> Iterator[Columns]:
        """Weights, both moments and gradients of up to CHUNK_NUMEL numbers at a time, of one or
        more parameters.
        """
        piece: list[tuple[Tensor, ...]] = []
        count = 0
        for parameter in parameters:
            state = self.state[parameter]
            whole = [
                local_part(t)
                for t in (parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad)
            ]
            if all(tensor.is_contiguous() for tensor in whole):
                rows = list(
                    zip(*(tensor.view(-1).split(CHUNK_NUMEL) for tensor in whole), strict=True)
                )
            else:
                rows = [tuple(whole)]
            for row in rows:
                if piece and count + row[0].numel() > CHUNK_NUMEL:
                    yield tuple(map(list, zip(*piece, strict=True)))  # type: ignore[misc]
                    piece = []
                    count = 0
                piece.append(row)
                count += row[0].numel()
        if piece:
            yield tuple(map(list, zip(*piece, strict=True)))  # type: ignore[misc]


def _update(
    weights: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    gradients: list[Tensor],
    steps: Any,
    group: dict[str, Any],
) -> None:
    """One AdamW update, in place. `steps`: a float, or a float64 scalar on the device."""
    beta1, beta2 = group["betas"]
    kept = (weights, first, second)
    w, m, v, g = ([tensor.float() for tensor in tensors] for tensors in (*kept, gradients))
    torch_private.foreach_lerp_(m, g, 1 - beta1)
    torch_private.foreach_mul_(v, beta2)
    torch_private.foreach_addcmul_(v, g, g, 1 - beta2)
    divisor = torch_private.foreach_sqrt(v)
    torch_private.foreach_div_(divisor, (1 - beta2**steps) ** 0.5)
    torch_private.foreach_add_(divisor, group["eps"])
    torch_private.foreach_mul_(w, 1 - group["lr"] * group["weight_decay"])
    if isinstance(steps, Tensor):  # the factor must be a number, which would have to be read
        torch_private.foreach_mul_(divisor, 1 - beta1**steps)
        torch_private.foreach_addcdiv_(w, m, divisor, -group["lr"])
    else:
        torch_private.foreach_addcdiv_(w, m, divisor, -group["lr"] / (1 - beta1**steps))
    for tensors, computed in zip(kept, (w, m, v), strict=True):
        if tensors[0].dtype != torch.float32:  # otherwise `computed` is the same tensor
            torch_private.foreach_copy_(tensors, computed)


def _update_unless(withheld: Tensor, piece: Columns, steps: Tensor, group: dict[str, Any]) -> None:
    """One AdamW update, which changes nothing where the scalar `withheld` is true; no host sync."""
    *kept, gradients = piece
    copies = [[tensor.clone() for tensor in tensors] for tensors in kept]
    _update(copies[0], copies[1], copies[2], gradients, steps, group)
    for tensors, computed in zip(kept, copies, strict=True):
        torch_private.foreach_copy_(
            tensors, [torch.where(withheld, a, b) for a, b in zip(tensors, computed, strict=True)]
        )
