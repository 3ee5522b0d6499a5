"""float8 layers: numbers against their definition, what is replaced, and that it trains."""

from __future__ import annotations

import math

import pytest
import torch
from model_builder import EVEN, small_model
from torch import nn

from titanlite.config import ConfigError
from titanlite.config_parallel import Float8
from titanlite.parallel.float8 import E4M3, E5M2, apply_float8, float8_linear, quantize

FORMATS = {E4M3: (4, 3, 448.0), E5M2: (5, 2, 57344.0)}  # bits of exponent and mantissa, largest number


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of the format, ties to even, by the definition of a floating-point format."""
    exponent_bits, mantissa_bits, largest = FORMATS[dtype]
    if value == 0:
        return 0.0
    smallest = 2 - 2 ** (exponent_bits - 1)  # exponent of the smallest normal number
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), smallest) - mantissa_bits)
    return math.copysign(min(round(abs(value) / step) * step, largest), value)


def reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scaled to the largest number, rounded and scaled back, one number at a time, in fp64."""
    scale = FORMATS[dtype][2] / max(float(x.abs().max()), 1e-12)
    values = [
        rounded(float(torch.tensor(value) * torch.tensor(scale)), dtype) / scale for value in x.flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(x.shape)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_numbers_are_the_nearest_of_the_format(dtype):
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-6, 3, 7)
    x[3, 3] = 0
    eight, scale = quantize(x, dtype)
    assert eight.dtype == dtype
    torch.testing.assert_close(eight.double() * scale.double(), reference(x, dtype), rtol=1e-6, atol=0)
    assert float(eight.float().abs().max()) == FORMATS[dtype][2]
    zero, scale = quantize(torch.zeros(3), dtype)
    assert not zero.float().any()
    assert torch.isfinite(scale)


@pytest.mark.parametrize("shape", [(32, 48), (2, 16, 48), (3, 5, 48)], ids=str)
def test_products_are_those_of_rounded_numbers(shape):
    """Output and both gradients equal the products of the reference's numbers, to fp32's rounding."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(shape, generator=generator), torch.randn(64, 48, generator=generator) * 0.02
    gradient = torch.randn(*shape[:-1], 64, generator=generator) * 1e-5
    x.requires_grad_(), weight.requires_grad_()
    out = float8_linear(x, weight, emulate=True)
    out.backward(gradient)
    x8, w8, g8 = reference(x.detach(), E4M3), reference(weight.detach(), E4M3), reference(gradient, E5M2)
    expected = [x8 @ w8.T, g8 @ w8, g8.flatten(0, -2).T @ x8.flatten(0, -2)]
    for found, wanted in zip([out, x.grad, weight.grad], expected, strict=True):
        assert (found.double() - wanted).norm() <= 1e-6 * wanted.norm()
    # and they are not those of the numbers themselves
    assert (out.double() - x.double() @ weight.double().T).norm() > 1e-3 * out.norm()


def test_linear_layers_of_the_blocks_are_replaced_but_for_those_skipped(caplog):
    model = small_model(config=EVEN)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with caplog.at_level("INFO", "titanlite"):
        apply_float8(model, Float8(enabled=True, emulate=True, skip="attention.wk, layers.0."), "cpu")
    # 4 layers of 7, layer 0 and 3 more wk skipped
    assert caplog.messages == ["float8: 18 linear layers; 10 skipped by name, 0 for sides that are no multiples of 16"]
    replaced = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "forward" in vars(module)
    }
    assert replaced == {
        f"layers.{i}.{name}"
        for i in (1, 2, 3)
        for name in ("attention.wq", "attention.wv", "attention.wo", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
    }
    assert before.keys() == dict(model.named_parameters()).keys()
    tokens = torch.randint(EVEN.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, eight = small_model(config=EVEN)(tokens), model(tokens)
    assert 1e-4 < float((plain - eight).norm() / plain.norm()) < 0.1


def test_without_the_hardware_it_is_refused():
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 .*; float8\.emulate = true computes the same"):
        apply_float8(small_model(config=EVEN), Float8(enabled=True), "cpu")
    model = small_model(config=EVEN)
    apply_float8(model, Float8(), "cpu")
    assert not any("forward" in vars(module) for module in model.modules())
