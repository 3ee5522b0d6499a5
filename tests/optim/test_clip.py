"""Clipping by the norm of all gradients and by units (AGC), against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_builder import EVEN, SMALL, build_stages, full, small_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.optim.agc import clip_units
from titanlite.optim.clip import clip_gradients


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_clipping_equals_its_definition(max_norm):
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5))
    model[1].bias.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
    norm = clip_gradients([model], max_norm, torch.device("cpu"))
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(expected, rel=1e-7)
    scale = min(1.0, max_norm / expected) if max_norm else 1.0
    for before, parameter in zip(
        grads, (p for p in model.parameters() if p.grad is not None), strict=True
    ):
        torch.testing.assert_close(parameter.grad, before * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "shape", [(5_000_000,), (4_882, 1_024), (128, 50_000), (50_001, 100), (0, 7)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_of_many_numbers_is_exact(shape, dtype):
    """torch's own fp32 norm is off by 4e-4 here on CPU."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3).to(
        dtype
    )
    module = nn.Module()
    module.weight = parameter
    assert float(clip_gradients([module], 0.0, torch.device("cpu"))) == pytest.approx(
        float(parameter.grad.double().norm()), rel=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipped_gradients_are_those_of_torch_bit_for_bit(dtype):
    """Given the same norm. On CUDA, tests/nullgpu counts the kernels."""
    model = nn.Linear(300, 7).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = nn.Linear(300, 7).to(dtype)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    norm = clip_gradients([model], 0.5, torch.device("cpu"))
    nn.utils.clip_grads_with_norm_(expected.parameters(), 0.5, norm)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


FACTOR = 0.05


def set_gradients(parts: list[Any]) -> None:
    """The same gradients in every layout, of very different sizes."""
    for name, p in (named for part in parts for named in part.named_parameters()):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = torch.randn(p.shape, generator=generator) * torch.logspace(-6, 2, len(p)).view(
            -1, *[1] * (p.ndim - 1)
        )
        sharded = isinstance(p, DTensor)
        p.grad = (
            distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            if sharded
            else whole
        )


def test_units_are_clipped_to_a_part_of_their_weights():
    model = small_model()
    with torch.no_grad():
        model.layers["0"].attention.wq.weight[3:9] = 0.0  # such rows may move too
    set_gradients([model])
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = clip_gradients([model], 1e-3, torch.device("cpu"), agc_factor=FACTOR)
    assert float(norm) == pytest.approx(
        float(torch.stack([g.norm() for g in before.values()]).norm()), rel=1e-6
    )
    scaled = 0
    for name, p in model.named_parameters():
        whole = p.detach(), before[name], p.grad
        rows = zip(*whole, strict=True) if p.ndim == 2 else [whole]
        for weight, old, new in rows:
            most = FACTOR * max(float(weight.norm()), 1e-3)
            scale = 1.0 if name == "output.weight" else min(1.0, most / float(old.norm()))
            scaled += scale < 1
            torch.testing.assert_close(new, scale * old, rtol=1e-5, atol=0)
    assert 100 < scaled < 800
    assert model.layers["0"].attention.wq.weight.grad[3:9].norm(dim=1).min() > 0


def test_a_gradient_of_zero_stays_zero():
    model = small_model()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    clip_units([model], FACTOR)
    assert not any(p.grad.any() for p in model.parameters())


def clipped(parallel: dict[str, int], llama: Any) -> dict[str, torch.Tensor]:
    parts = build_stages(parallel, 0, llama).model_parts
    set_gradients(parts)
    clip_units(parts, FACTOR)
    return {name: full(p.grad) for part in parts for name, p in part.named_parameters()}


@pytest.mark.parametrize(
    ("llama", "parallel"),
    [
        (SMALL, {"dp_shard": 3}),
        (replace(EVEN, qkv_bias=True), {"dp_shard": 2, "tp": 2}),
        (EVEN, {"pp": 2, "cp": 2}),
        pytest.param(EVEN, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
)
def test_each_layout_clips_alike(pool, llama, parallel):
    (expected,) = pool.run(1, clipped, {}, llama)
    ranks = pool.run(math.prod(parallel.values()), clipped, parallel, llama)
    assert set().union(*ranks) == expected.keys()
    for name, value in ((name, value) for found in ranks for name, value in found.items()):
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=0, msg=name)
