"""float8 training of linear layers: matrix products of 8-bit numbers with one scale per tensor.

What it is: a linear layer has three products (output, gradient of the input, gradient of the weight). Both factors of
each are scaled so that the largest number just fits, rounded to 8 bits, multiplied by `torch._scaled_mm`, and scaled
back; the result has the compute dtype (arXiv 2209.05433). Sums are fp32; in the forward the hardware may use fewer
bits. Inputs and weights are e4m3 (4 exponent bits, 3 mantissa bits, up to 448); gradients of outputs are e5m2 (up to
57,344), since they need range more than precision. A scale is computed from the tensor that it scales, not from earlier
steps. Parameters, gradients, moments and all other operations keep their dtypes. Why it is here: tensor cores multiply
float8 at twice the rate of bfloat16. What it costs: one pass over each tensor to find its largest absolute value and
one to round it, which the compiler fuses with the previous operation; without `compile` they are separate kernels.
These layers keep their precision: the output layer, layers that `float8.skip` names, and layers whose sides are not
multiples of 16, as the hardware requires. `float8.emulate` rounds the same numbers and multiplies them in fp32, on any
device, slowly.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import ConfigError, Float8Config
from titanlite.distributed.torch_private import scaled_mm

logger = logging.getLogger("titanlite")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the hardware requires both sides of a matrix to be multiples of this
MIN_AMAX = 1e-12  # used instead of a tensor's largest absolute value if that is smaller, for example zero


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` as 8-bit numbers, and the fp32 scalar that multiplies them back to `x`."""
    largest = x.abs().amax().float().clamp(min=MIN_AMAX)
    limit = torch.finfo(dtype).max
    return (x.float() * (limit / largest)).clamp(-limit, limit).to(dtype), largest / limit


def scaled_matmul(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: torch.dtype, emulate: bool, fast: bool
) -> Tensor:
    """a (M, K) times b (K, N), each 8-bit numbers and their scale. `fast`: the hardware accumulates with fewer bits."""
    (x, x_scale), (y, y_scale) = a, b
    if emulate:
        found = (x.float() @ y.float()) * (x_scale * y_scale)
        # `to` with an unchanged dtype returns its input, and torch 2.11 compiles a Function that returns such an alias
        # to one without gradient (pytorch#180642).
        return found if found.dtype == out else found.to(out)
    by_columns = y.t().contiguous().t()  # the layout that the hardware requires
    return scaled_mm(x.contiguous(), by_columns, x_scale, y_scale, out_dtype=out, use_fast_accum=fast)


class _Float8Linear(torch.autograd.Function):
    """x (M, K), weight (N, K) -> x weight^T (M, N)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, emulate: bool) -> Tensor:
        x8, w8 = quantize(x, E4M3), quantize(weight, E4M3)
        # The weight is saved, not its 8-bit copy: FSDP may free the parameter and gather it again.
        ctx.save_for_backward(*x8, weight)
        ctx.emulate = emulate
        return scaled_matmul(x8, (w8[0].t(), w8[1]), x.dtype, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x8, x_scale, weight = ctx.saved_tensors
        (g8, g_scale), w8 = quantize(gradient, E5M2), quantize(weight, E4M3)
        to_x = scaled_matmul((g8, g_scale), w8, gradient.dtype, ctx.emulate, fast=False)
        to_weight = scaled_matmul((g8.t(), g_scale), (x8, x_scale), weight.dtype, ctx.emulate, fast=False)
        return to_x, to_weight, None


def float8_linear(x: Tensor, weight: Tensor, emulate: bool) -> Tensor:
    """x (..., K), weight (N, K) -> (..., N). The number of rows is padded with zeros to a multiple of 16."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    out: Tensor = _Float8Linear.apply(rows, weight, emulate)
    return out[: len(out) - missing].unflatten(0, x.shape[:-1])


class Float8Linear(nn.Linear):
    """A linear layer without bias whose products are in 8 bits."""

    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.emulate)


def apply_float8(model: Any, config: Float8Config, device_type: str) -> None:
    """Replaces the class of each linear layer in the blocks that is not skipped; parameters do not change.

    Raises ConfigError if the device does not support float8 products.
    """
    if not config.emulate and (device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9)):
        raise ConfigError(
            "float8.enabled = true needs a CUDA device of compute capability 8.9 (L40S, H100) or later; "
            "float8.emulate = true computes the same numbers on any, slowly"
        )
    linear: dict[str, Any] = {
        name: module for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)
    }
    left = {name for name, module in linear.items() if any(part in f"layers.{name}" for part in config.skipped)}
    odd = {name for name, module in linear.items() if any(side % MULTIPLE for side in module.weight.shape)}
    for name, module in linear.items():
        if name not in left | odd:
            # The class is replaced, not the forward, so that all blocks have the same code and one compiled graph.
            module.__class__, module.emulate = Float8Linear, config.emulate
    logger.info(
        "float8: %d linear layers; %d skipped by name, %d for sides that are not multiples of %d",
        len(linear) - len(left | odd),
        len(left),
        len(odd - left),
        MULTIPLE,
    )
