"""float8 training of linear layers: matrix products of 8-bit numbers with one scale per tensor, or
per row.

What it is: a linear layer has three products (output, gradient of the input, gradient of the
weight). Both factors of each are scaled so that the largest number just fits, rounded to 8 bits,
multiplied by `torch._scaled_mm`, and scaled back; the result has the compute dtype (arXiv
2209.05433). Sums are fp32; in the forward the hardware may use fewer bits. Inputs and weights are
e4m3 (4 exponent bits, 3 mantissa bits, up to 448); gradients of outputs are e5m2 (up to 57,344),
since they need range more than precision. A scale is computed from the tensor that it scales, not
from earlier steps. Parameters, gradients, moments and all other operations keep their dtypes. Why
it is here: tensor cores multiply float8 at twice the rate of bfloat16. What it costs: one pass over
each tensor to find its largest absolute value and one to round it, which the compiler fuses with
the previous operation; without `compile` they are separate kernels. These layers keep their
precision: the output layer, layers that `float8.skip` names, and layers whose sides (under tensor
parallel, the sides of a rank's part) are not multiples of 16, as the hardware requires.
`float8.emulate` rounds the same numbers and multiplies them in fp32, on any device, slowly.

`float8.scaling = rowwise`: one scale for each row of the first factor and each column of the
second, so an outlier affects the rounding of its row only. All numbers are e4m3. Each tensor is
rounded twice, since the rows along which it is summed differ between products, and the input is
saved in the compute dtype, not in 8 bits.

Under tensor parallel a scale is that of the whole tensor, so that the numbers are those of one
process: the ranks agree on the largest value wherever a scale covers more than one rank's part.
With one scale per tensor these are 3 all-reduces of 4 bytes for a layer cut by columns or rows
(weight twice, and input or gradient); with one per row, of a number for each row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite.config.schema import Float8Config
from titanlite.distributed.torch_private import scaled_mm
from titanlite.runtime.errors import ConfigError

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

logger = logging.getLogger("titanlite")
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16  # the hardware requires both sides of a matrix to be multiples of this
# Used instead of a tensor's largest absolute value if that is smaller, for example zero
MIN_AMAX = 1e-12
CUT_BY_COLUMNS = ("wo", "w2")  # under tensor parallel; other weights are cut by rows


class Scaled(NamedTuple):
    """A matrix as 8-bit numbers, and the fp32 scale that multiplies them back to the matrix."""

    numbers: Tensor
    scale: Tensor  # a scalar, or one number for each row or column

    def t(self) -> Scaled:
        return Scaled(self.numbers.t(), self.scale.t())


def quantize(
    x: Tensor, dtype: torch.dtype, dim: int | None = None, mesh: DeviceMesh | None = None
) -> Scaled:
    """Rounds `x` to 8 bits with one scale, or with one scale for all numbers along `dim`.

    `mesh`: the ranks that hold the other parts of the tensor; all parts get the same scale.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    if mesh is not None:
        of_this_part = DTensor.from_local(largest, mesh, [Partial("max")])
        largest = of_this_part.redistribute(placements=[Replicate()]).to_local()
    largest = largest.float().clamp(min=MIN_AMAX)
    limit = torch.finfo(dtype).max
    numbers = (x.float() * (limit / largest)).clamp(-limit, limit).to(dtype)
    return Scaled(numbers, scale=largest / limit)


class Scaling(NamedTuple):
    """How the factors of a layer's products are scaled.

    Sides of matrices: M rows of the input, K features of the input, N of the output.
    """

    emulate: bool
    rowwise: bool = False
    mesh: DeviceMesh | None = None  # the tp axis
    cut: str = ""  # "N" or "K": the side of the weight that tp divides

    def quantize(self, x: Tensor, dtype: torch.dtype, sides: str, summed: str) -> Scaled:
        """Rounds `x` with sides `sides` (as "MK") for a product that sums over side `summed`."""
        # One scale covers a row along the summed side, or the whole matrix
        dim = None
        covered = sides
        if self.rowwise:
            dim = sides.index(summed)
            covered = summed
        divided = self.cut != "" and self.cut in covered  # then the ranks agree on the scale
        return quantize(x, dtype, dim, self.mesh if divided else None)


def scaled_matmul(a: Scaled, b: Scaled, out: torch.dtype, emulate: bool, fast: bool) -> Tensor:
    """Multiplies a (M, K) by b (K, N) -> (M, N) of dtype `out`.

    `fast`: the hardware accumulates with fewer bits.
    """
    if emulate:
        product = (a.numbers.float() @ b.numbers.float()) * (a.scale * b.scale)
        # `to` with an unchanged dtype returns its input, and torch 2.11 compiles a Function that
        # returns such an alias to one without gradient (pytorch#180642).
        return product if product.dtype == out else product.to(out)
    by_columns = b.numbers.t().contiguous().t()  # the layout that the hardware requires
    return scaled_mm(
        a.numbers.contiguous(),
        by_columns,
        a.scale.contiguous(),
        b.scale.contiguous(),
        out_dtype=out,
        use_fast_accum=fast,
    )


class _Float8Linear(torch.autograd.Function):
    """The product x (M, K), weight (N, K) -> x weight^T (M, N), in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        x8 = scaling.quantize(x, E4M3, "MK", "K")
        w8 = scaling.quantize(weight, E4M3, "NK", "K")
        # The weight is saved, not its 8-bit copy: FSDP may free the parameter and gather it again
        if scaling.rowwise:
            ctx.save_for_backward(weight, x)  # x is rounded again, along M
        else:
            ctx.save_for_backward(weight, x8.numbers, x8.scale)
        ctx.scaling = scaling
        return scaled_matmul(x8, w8.t(), x.dtype, scaling.emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scaling: Scaling = ctx.scaling
        weight, *saved = ctx.saved_tensors
        w8 = scaling.quantize(weight, E4M3, "NK", "N")
        if scaling.rowwise:
            g8 = scaling.quantize(gradient, E4M3, "MN", "N")
            g8_by_columns = scaling.quantize(gradient, E4M3, "MN", "M")
            x8 = scaling.quantize(saved[0], E4M3, "MK", "M")
        else:
            g8 = scaling.quantize(gradient, E5M2, "MN", "N")
            g8_by_columns = g8  # one scale serves both products
            x8 = Scaled(*saved)
        to_x = scaled_matmul(g8, w8, gradient.dtype, scaling.emulate, fast=False)
        to_weight = scaled_matmul(g8_by_columns.t(), x8, weight.dtype, scaling.emulate, fast=False)
        return to_x, to_weight, None


def float8_linear(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """Multiplies x (..., K) by weight^T (K, N) -> (..., N) in 8 bits.

    The number of rows is padded with zeros to a multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    out: Tensor = _Float8Linear.apply(rows, weight, scaling)
    return out[: len(out) - missing].unflatten(0, x.shape[:-1])


def float8_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, emulate: bool, rowwise: bool
) -> Tensor:
    """Computes `F.linear` with products in 8 bits, also under tensor parallel.

    A bias is added in the compute dtype.
    """
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        out = _float8_product_over_tp(x, weight, emulate, rowwise)
    else:
        out = float8_linear(x, weight, Scaling(emulate, rowwise))
    return out if bias is None else out + bias


def _float8_product_over_tp(x: DTensor, weight: DTensor, emulate: bool, rowwise: bool) -> Tensor:
    mesh = x.device_mesh
    features = Shard(x.ndim - 1)
    # Where the weight is cut by rows, each rank has one term of the input's gradient; where it
    # is cut by columns, one term of the output.
    to_x: Placement = features
    to_out: Placement = Partial()
    cut = "K"
    if weight.placements[0] == Shard(0):
        to_x = Partial()
        to_out = features
        cut = "N"
    scaling = Scaling(emulate, rowwise, mesh, cut)
    out = float8_linear(x.to_local(grad_placements=[to_x]), weight.to_local(), scaling)
    return DTensor.from_local(out, mesh, [to_out], run_check=False)


class Float8Linear(nn.Linear):
    """A linear layer whose products are in 8 bits."""

    def __init__(self, layer: nn.Linear, product: Callable[..., Tensor]) -> None:
        """Takes the parameters of `layer`. `product`: `float8_product` with its options."""
        biased = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=biased, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def apply_float8(model: Llama, config: Float8Config, device_type: str, tp: int = 1) -> None:
    """Replaces each linear layer in the blocks that is not skipped; parameters do not change.

    `tp`: the number of ranks over which tensor parallel will divide each layer.
    Raises ConfigError if the device does not support float8 products.
    """
    if not config.emulate and (
        device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9)
    ):
        raise ConfigError(
            "float8.enabled = true needs a CUDA device of compute capability 8.9 (L40S, H100) or "
            "later; "
            "float8.emulate = true computes the same numbers on any device, slowly"
        )
    num_converted = 0
    num_skipped = 0
    num_odd = 0
    # One object, because blocks with different ones would be compiled one by one
    rowwise = config.scaling == "rowwise"
    product = functools.partial(float8_product, emulate=config.emulate, rowwise=rowwise)
    for name, module in list(model.layers.named_modules(prefix="layers")):
        if not isinstance(module, nn.Linear):
            continue
        if any(part in name for part in config.skipped):
            num_skipped += 1
        elif any(side % MULTIPLE for side in _sides(name, module, tp)):
            num_odd += 1
        else:
            num_converted += 1
            model.set_submodule(name, Float8Linear(module, product))
    logger.info(
        "float8: %d linear layers; %d skipped by name, %d for sides that are not multiples of %d",
        num_converted,
        num_skipped,
        num_odd,
        MULTIPLE,
    )


def _sides(name: str, module: nn.Linear, tp: int) -> tuple[int, int]:
    """Returns (N, K) of a rank's part of the weight."""
    n, k = module.weight.shape
    if name.endswith(CUT_BY_COLUMNS):
        return n, k // tp
    return n // tp, k
