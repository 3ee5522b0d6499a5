"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen model learns by small matrices beside its
own.

What it is: a linear layer with an adapter computes W x + s B A x. W (N, K) is frozen; A (r, K) and
B (N, r) are trained, with r = `lora.rank` much smaller than N and K. s is alpha / r, or alpha /
sqrt(r) with `lora.rslora` (arXiv 2312.03732). B begins as zeros, so training begins with the model
as it was. Afterwards W + s B A is a matrix like W, and the model needs no adapters any more
(`tools/formats/adapters.py` adds them up).
Why it is here: frozen weights need no gradient and no moments, 4 bytes per parameter in fp32
instead of 16, and a checkpoint holds only A and B.
What it costs: r (N + K) parameters for each adapted layer, and their products in the forward and
backward. The gradient of the activations is computed as before, that of W is not: 4 FLOPs per
parameter and token instead of 6.

Under tensor parallel an adapter is cut as its layer is. A layer that is cut by output features (wq,
wk, wv, w1, w3) has the matching rows of B, and all of A; one that is cut by input features (wo, w2)
the matching columns of A, and all of B, and its adapter's result is a partial sum, which is reduced
together with the layer's own. So adapters add no communication to the forward. The factor that is
whole on every rank (A of wq, B of wo) gets a partial gradient on each; FSDP sums these over tp
before it reduces the gradient, as it does for norms.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titanlite.config.schema import LoraConfig

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

FACTORS = (".lora_a.weight", ".lora_b.weight")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter."""
    return name.endswith(FACTORS)


def is_frozen(name: str) -> bool:
    """Whether a parameter of this name is frozen, in a model with adapters."""
    return not is_adapter(name)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter; mixed into the class that the layer has (`with_adapter`)."""

    lora_a: nn.Linear  # (r, K)
    lora_b: nn.Linear  # (N, r)
    lora_scale: float
    lora_used: bool  # False within `without_adapters`

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, K) -> (B, S, N)"""
        if not self.lora_used:
            return super().forward(x)
        return super().forward(x) + self.adapter(x)

    def adapter(self, x: Tensor) -> Tensor:
        """s B A x; under tensor parallel this rank's part of it, or its term of the sum."""
        a = self.lora_a.weight
        b = self.lora_b.weight
        if not isinstance(x, DTensor):
            return F.linear(F.linear(x, a) * self.lora_scale, b)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        mesh = x.device_mesh
        features = Shard(x.ndim - 1)
        to_out: Placement
        # The rank's gradients of what is not cut are terms of a sum
        if b.placements[0] == Shard(0):
            whole_x = x.to_local(grad_placements=[Partial()])
            hidden = F.linear(whole_x, a.to_local(grad_placements=[Partial()]))
            rows = b.to_local()
            to_out = features
        else:
            hidden = F.linear(x.to_local(), a.to_local())  # this rank's term
            rows = b.to_local(grad_placements=[Partial()])
            to_out = Partial()
        out = F.linear(hidden * self.lora_scale, rows)
        return DTensor.from_local(out, mesh, [to_out], run_check=False)


@functools.cache
def with_adapter(kind: type[nn.Linear]) -> type[nn.Linear]:
    """A subclass of a kind of linear layer (`nn.Linear`, `Float8Linear`) that adds the adapter.

    The same for all blocks, so they are compiled once.
    """
    return type(f"LoRA{kind.__name__}", (LoRALinear, kind), {})


def apply_lora(model: Llama, config: LoraConfig) -> None:
    """Freezes a part of the model, and adds adapters to its linear layers that `config` names.

    It comes after `apply_float8` and `apply_tp`: an adapter is cut as its layer is.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for number, block in model.layers.items():
        if not config.adapts_layer(int(number)):
            continue
        for name, layer in list(block.named_modules()):
            if name.rpartition(".")[2] in config.target_names:
                assert isinstance(layer, nn.Linear)
                add_adapter(layer, config)


def add_adapter(layer: nn.Linear, config: LoraConfig) -> None:
    """Adds the two factors of an adapter to a linear layer, without values yet."""
    weight = layer.weight  # (N, K), whatever part of it this rank has
    features_out, features_in = weight.shape
    linear = functools.partial(nn.Linear, bias=False, device=weight.device, dtype=weight.dtype)
    a = linear(features_in, config.rank)
    b = linear(config.rank, features_out)
    if isinstance(weight, DTensor):
        by_rows = weight.placements[0] == Shard(0)
        a.weight = _cut(a.weight, weight, Replicate() if by_rows else Shard(1))
        b.weight = _cut(b.weight, weight, Shard(0) if by_rows else Replicate())
    layer.__class__ = with_adapter(type(layer))  # type: ignore[arg-type]  # hashable
    assert isinstance(layer, LoRALinear)
    layer.lora_a = a
    layer.lora_b = b
    layer.lora_scale = config.scale
    layer.lora_used = True


@contextlib.contextmanager
def without_adapters(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the model is the one that adapters were added to."""
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, LoRALinear)]
    for layer in layers:
        layer.lora_used = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_used = True


def _cut(factor: Tensor, weight: DTensor, placement: Placement) -> nn.Parameter:
    """A factor as a DTensor on the mesh of the layer's weight."""
    return nn.Parameter(distribute_tensor(factor.detach(), weight.device_mesh, [placement]))
