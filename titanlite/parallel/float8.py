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

import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.config.schema import Float8Config
from titanlite.distributed.torch_private import scaled_mm
from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16  # the hardware requires both sides of a matrix to be multiples of this
# Used instead of a tensor's largest absolute value if that is smaller, for example zero
MIN_AMAX = 1e-12
CUT_BY_COLUMNS = ("wo", "w2")  # under tensor parallel; other weights are cut by rows


def quantize(
    x: Tensor, dtype: torch.dtype, dim: int | None = None, mesh: DeviceMesh | None = None
) -> tuple[Tensor, Tensor]:
    """`x` as 8-bit numbers, and the fp32 scale that multiplies them back to `x`: a scalar, or one
    along `dim`.

    `mesh`: `x` is a part of a tensor whose other parts are on these ranks; they get the same scale.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    if mesh is not None:
        largest = (
            DTensor.from_local(largest, mesh, [Partial("max")])
            .redistribute(placements=[Replicate()])
            .to_local()
        )
    largest = largest.float().clamp(min=MIN_AMAX)
    limit = torch.finfo(dtype).max
    return (x.float() * (limit / largest)).clamp(-limit, limit).to(dtype), largest / limit


class Scaling(NamedTuple):
    """How a layer is scaled.

    Sides of matrices: M rows of the input, K features of the input, N of the output.
    """

    emulate: bool
    rowwise: bool = False
    mesh: DeviceMesh | None = None  # of tensor parallel
    cut: str = ""  # the side of the weight (N, K) that is divided over the mesh

    def quantize(
        self, x: Tensor, dtype: torch.dtype, sides: str, summed: str
    ) -> tuple[Tensor, Tensor]:
        """For a product that sums over the side `summed`; `sides`: those of `x`, as "MK"."""
        # One scale holds for a row along the summed side, or for the whole matrix
        covered = summed if self.rowwise else sides
        dim = sides.index(summed) if self.rowwise else None
        divided = self.cut != "" and self.cut in covered
        return quantize(x, dtype, dim, self.mesh if divided else None)


def scaled_matmul(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: torch.dtype, emulate: bool, fast: bool
) -> Tensor:
    """a (M, K) times b (K, N), each 8-bit numbers and their scale.

    `fast`: the hardware accumulates with fewer bits.
    """
    (x, x_scale), (y, y_scale) = a, b
    if emulate:
        product = (x.float() @ y.float()) * (x_scale * y_scale)
        # `to` with an unchanged dtype returns its input, and torch 2.11 compiles a Function that
        # returns such an alias to one without gradient (pytorch#180642).
        return product if product.dtype == out else product.to(out)
    by_columns = y.t().contiguous().t()  # the layout that the hardware requires
    scales = x_scale.contiguous(), y_scale.contiguous()
    return scaled_mm(x.contiguous(), by_columns, *scales, out_dtype=out, use_fast_accum=fast)


def _transposed(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].t(), x[1].t()


class _Float8Linear(torch.autograd.Function):
    """x (M, K), weight (N, K) -> x weight^T (M, N)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        x8 = scaling.quantize(x, E4M3, "MK", "K")
        w8 = scaling.quantize(weight, E4M3, "NK", "K")
        # The weight is saved, not its 8-bit copy: FSDP may free the parameter and gather it again.
        ctx.save_for_backward(*([x] if scaling.rowwise else x8), weight)
        ctx.scaling = scaling
        return scaled_matmul(x8, _transposed(w8), x.dtype, scaling.emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scaling = ctx.scaling
        *x8, weight = ctx.saved_tensors
        e5m2 = E4M3 if scaling.rowwise else E5M2
        g8 = scaling.quantize(gradient, e5m2, "MN", "N")
        w8 = scaling.quantize(weight, E4M3, "NK", "N")
        to_x = scaled_matmul(g8, w8, gradient.dtype, scaling.emulate, fast=False)
        if scaling.rowwise:
            g8 = scaling.quantize(gradient, E4M3, "MN", "M")
            x8 = scaling.quantize(x8[0], E4M3, "MK", "M")
        to_weight = scaled_matmul(
            _transposed(g8), tuple(x8), weight.dtype, scaling.emulate, fast=False
        )
        return to_x, to_weight, None


def float8_linear(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """x (..., K), weight (N, K) -> (..., N).

    The number of rows is padded with zeros to a multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    out: Tensor = _Float8Linear.apply(rows, weight, scaling)
    return out[: len(out) - missing].unflatten(0, x.shape[:-1])


class Float8Linear(nn.Linear):
    """A linear layer without bias whose products are in 8 bits."""

    emulate: bool
    rowwise: bool

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(x, DTensor):
            return float8_linear(x, weight, Scaling(self.emulate, self.rowwise))
        mesh = x.device_mesh
        by_rows = weight.placements[0] == Shard(0)
        features = Shard(x.ndim - 1)
        scaling = Scaling(self.emulate, self.rowwise, mesh, "N" if by_rows else "K")
        # By rows, each rank has one term of the input's gradient; by columns, one term of the
        # output.
        rows = x.to_local(grad_placements=[Partial() if by_rows else features])
        out = float8_linear(rows, weight.to_local(), scaling)
        return DTensor.from_local(out, mesh, [features if by_rows else Partial()], run_check=False)


def apply_float8(model: Any, config: Float8Config, device_type: str, tp: int = 1) -> None:
    """Replaces the class of each linear layer in the blocks that is not skipped; parameters do not
    change.

    `tp`: over how many ranks tensor parallel will divide each layer.
    Raises ConfigError if the device does not support float8 products.
    """
    if not config.emulate and (
        device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9)
    ):
        raise ConfigError(
            "float8.enabled = true needs a CUDA device of compute capability 8.9 (L40S, H100) or "
            "later; "
            "float8.emulate = true computes the same numbers on any, slowly"
        )
    linear: dict[str, Any] = {
        name: module
        for name, module in model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    skipped = {name for name in linear if any(part in f"layers.{name}" for part in config.skipped)}
    odd = {
        name
        for name, module in linear.items()
        if any(side % MULTIPLE for side in _sides(name, module, tp))
    }
    for name, module in linear.items():
        if name not in skipped | odd:
            # The class is replaced, not the forward, so that all blocks have the same code and one
            # compiled graph.
            module.__class__ = Float8Linear
            module.emulate = config.emulate
            module.rowwise = config.scaling == "rowwise"
    logger.info(
        "float8: %d linear layers; %d skipped by name, %d for sides that are not multiples of %d",
        len(linear) - len(skipped | odd),
        len(skipped),
        len(odd - skipped),
        MULTIPLE,
    )


def _sides(name: str, module: nn.Linear, tp: int) -> tuple[int, int]:
    """(N, K) of a rank's part of the weight."""
    n, k = module.weight.shape
    return (n, k // tp) if name.endswith(CUT_BY_COLUMNS) else (n // tp, k)
