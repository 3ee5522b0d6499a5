"""Mixed precision on one rank: parameters in one dtype, computation in another.

What it is: each parameter is cast where a module uses it, `weight.to(compute)`, and autograd casts
its gradient back. So parameters, gradients and moments keep `training.param_dtype`, and activations
and matrix products have `training.compute_dtype`, as with FSDP's `MixedPrecisionPolicy`. An
embedding is cast after the lookup, only the rows that are used.
Why it is here: FSDP casts as well, but on one rank it also copies each unit into and out of the
buffers that it would communicate.
What it costs: for each parameter 4 bytes are read and 2 written by the cast, and the reverse for
its gradient. The cast weights are kept until the backward, 2 bytes per parameter, unless the block
is recomputed (`recompute.mode = full`).

A norm computes the gradient of its weight in fp32. Autograd rounds it to the dtype of the cast
weight, unless the cast says otherwise. FSDP2 does so from torch 2.15 on, and so does this cast,
where the block is not compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def apply_mixed_precision(model: nn.Module, compute: torch.dtype) -> None:
    """Makes modules cast each parameter of another dtype where they use it.

    All parameters of a Llama are called `weight` or `bias`.
    """
    assert all(name.endswith((".weight", ".bias")) for name, _ in model.named_parameters())
    for module in model.modules():
        if any(parameter.dtype != compute for parameter in module.parameters(recurse=False)):
            kind = type(module)
            module.__class__ = _casting(kind, compute)  # type: ignore[arg-type]  # hashable


class _Cast(torch.autograd.Function):
    """Casts a parameter; its gradient is not rounded to the dtype of the result."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, compute: torch.dtype) -> Tensor:
        ctx.set_output_grad_dtype(parameter.dtype)
        return parameter.to(compute)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@functools.cache
def _casting(kind: type[nn.Module], compute: torch.dtype) -> type[nn.Module]:
    """Derives a class whose attributes `weight` and `bias` are cast.

    All blocks get the same class, so they are compiled once.
    """

    # torch compares versions, not strings
    unrounded = issubclass(kind, nn.RMSNorm) and torch.__version__ >= "2.15"

    def weight(self: nn.Module) -> Tensor:
        # not `get_parameter`, which would call this property again
        parameter = self._parameters["weight"]
        assert parameter is not None
        if unrounded and not torch.compiler.is_compiling():
            return _Cast.apply(parameter, compute)
        return parameter.to(compute)

    def bias(self: nn.Module) -> Tensor | None:
        parameter = self._parameters.get("bias")
        return None if parameter is None else parameter.to(compute)

    def look_up(self: nn.Module, tokens: Tensor) -> Tensor:
        parameter = self._parameters["weight"]
        assert parameter is not None
        return F.embedding(tokens, parameter).to(compute)

    members: dict[str, object] = {"weight": property(weight), "bias": property(bias)}
    if issubclass(kind, nn.Embedding):
        members["forward"] = look_up
    return type(kind.__name__, (kind,), members)
