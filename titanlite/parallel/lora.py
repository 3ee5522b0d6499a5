"""Low-rank adapters (LoRA, arXiv 2106.09685): small trained matrices beside the frozen weights.

What it is: a linear layer with an adapter computes W x + s B A x. W (N, K) is frozen; A (r, K) and
B (N, r) are trained, with r = `lora.rank` much smaller than N and K. s is alpha / r, or alpha /
sqrt(r) with `lora.rslora` (arXiv 2312.03732). B begins as zeros, so training begins with the model
as it was. After training, W + s B A can replace W, and the model needs no adapters
(`tools/formats/adapters.py` computes the sums).
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

With `lora.dropout` = p an adapter computes s B A d(x): d sets numbers of x to 0, each with the
probability p, and divides the others by 1 - p. Each adapter has a different mask (as in PEFT), and
it is the same in every layout (`dropout.py`). What it costs: x and its mask are kept until the
backward for each adapter, (b + 1) B S K bytes with b bytes per number, where adapters of one input
otherwise share x. Evaluation has no dropout.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titanlite.config.schema import LoraConfig
from titanlite.model.wrappable import Wrappable
from titanlite.parallel.dropout import dropped
from titanlite.parallel.float8 import Float8Linear

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


def draw_a(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Fills factor A (r, K) from a uniform distribution with the std 1 / sqrt(3 K), as in PEFT."""
    bound = weight.shape[1] ** -0.5
    return weight.uniform_(-bound, bound, generator=generator)


def draw_b(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Fills factor B with zeros: training begins with the model as it was."""
    return weight.zero_()


INITIAL_VALUES = {".lora_a.weight": draw_a, ".lora_b.weight": draw_b}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter."""
    return name.endswith(tuple(INITIAL_VALUES))


def is_frozen(name: str) -> bool:
    """Whether a parameter of this name is frozen, in a model with adapters."""
    return not is_adapter(name)


class LoRALinear(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, layer: nn.Linear, config: LoraConfig, name: str) -> None:
        """Takes the parameters and the product of `layer`, whose name in the model is `name`.

        The two factors of the adapter have no values yet.
        """
        super().__init__()
        self.weight = layer.weight  # (N, K)
        self.bias = layer.bias
        self.product: Callable[..., Tensor] = F.linear
        if isinstance(layer, Float8Linear):
            self.product = layer.product
        device = layer.weight.device
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=layer.weight.dtype)
        self.lora_a = linear(layer.in_features, config.rank)  # (r, K)
        self.lora_b = linear(config.rank, layer.out_features)  # (N, r)
        self.lora_scale = config.scale
        self.lora_dropout = config.dropout
        # For the dropout mask: a number from the adapter's name, and the index of x's first feature
        # (not 0 where a rank has a part of the features). The salt is a tensor, because blocks that
        # differ in a Python number would be compiled one by one; on the CPU, because the model is
        # still on the meta device, where tensors have no values.
        self.lora_salt = torch.tensor(zlib.crc32(name.encode()), device="cpu")
        self.lora_first = 0
        # (B, S): the keys of the tokens in this forward; None: no dropout
        self.dropout_keys: Tensor | None = None

    def shard(self, mesh: DeviceMesh, by_rows: bool) -> None:
        """Divides the parameters over the tp axis, by output features or by input features."""
        if by_rows:
            placements = [Shard(0), Replicate(), Shard(0)]
        else:
            placements = [Shard(1), Shard(1), Replicate()]
            self.lora_first = mesh.get_local_rank() * (self.weight.shape[1] // mesh.size())
        for module, placement in zip((self, self.lora_a, self.lora_b), placements, strict=True):
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter.detach(), mesh, [placement])
                setattr(module, name, nn.Parameter(cut))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the adapter's output to the layer's: x (B, S, K) -> (B, S, N)."""
        return self.product(x, self.weight, self.bias) + self.adapter(x)

    def adapter(self, x: Tensor) -> Tensor:
        """Computes s B A x; under tensor parallel this rank's part, or its term of the sum."""
        a = self.lora_a.weight
        b = self.lora_b.weight
        if not isinstance(x, DTensor):
            return F.linear(self.hidden(x, a), b)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        mesh = x.device_mesh
        features = Shard(x.ndim - 1)
        to_out: Placement
        # The gradient of a factor that is not cut is a sum over ranks: each has one term
        if b.placements[0] == Shard(0):
            whole_x = x.to_local(grad_placements=[Partial()])
            hidden = self.hidden(whole_x, a.to_local(grad_placements=[Partial()]))
            rows = b.to_local()
            to_out = features
        else:
            hidden = self.hidden(x.to_local(), a.to_local())  # this rank's term
            rows = b.to_local(grad_placements=[Partial()])
            to_out = Partial()
        return DTensor.from_local(F.linear(hidden, rows), mesh, [to_out], run_check=False)

    def hidden(self, x: Tensor, a: Tensor) -> Tensor:
        """Computes s A d(x) over this rank's features: x (B, S, K), a (r, K) -> (B, S, r)."""
        if self.dropout_keys is None:
            return F.linear(x, a) * self.lora_scale
        mask = dropped(
            self.dropout_keys, self.lora_salt, self.lora_first, x.shape[-1], self.lora_dropout
        )
        return F.linear(x.masked_fill(mask, 0), a) * (self.lora_scale / (1 - self.lora_dropout))


def apply_lora(model: Llama, config: LoraConfig) -> None:
    """Replaces the linear layers that `config` names by layers with adapters.

    Call it after `apply_float8` and before `apply_tp`; then `freeze` the other parameters. For
    dropout, call `apply_dropout` too.
    """
    model.initial_values.update(INITIAL_VALUES)
    for number, block in model.layers.items():
        if not config.adapts_layer(int(number)):
            continue
        for name, layer in list(block.named_modules()):
            if name.rpartition(".")[2] in config.target_names:
                assert isinstance(layer, nn.Linear)
                adapted = LoRALinear(layer, config, f"layers.{number}.{name}")
                block.set_submodule(name, adapted)


def apply_dropout(model: Llama) -> None:
    """Makes blocks pass `dropout_keys` (B, S), one of the model's `block_inputs`, to adapters.

    The wrapper lies inside what a recomputation repeats, since another microbatch may have been
    computed in the meantime; and outside of a compiled graph, so that the keys are an input of it.
    """
    for block in model.layers.values():
        assert isinstance(block, Wrappable)
        adapters = [module for module in block.modules() if isinstance(module, LoRALinear)]
        block.wrap(passing_keys, adapters=adapters)


def passing_keys(
    computation: Callable[..., Tensor], adapters: Sequence[LoRALinear]
) -> Callable[..., Tensor]:
    """Wraps the computation of a block with these adapters."""
    return functools.partial(_with_keys, computation, adapters)


def _with_keys(
    computation: Callable[..., Tensor],
    adapters: Sequence[LoRALinear],
    *arguments: object,
    dropout_keys: Tensor | None = None,
    **routing: Tensor,
) -> Tensor:
    for adapter in adapters:
        adapter.dropout_keys = dropout_keys
    return computation(*arguments, **routing)
