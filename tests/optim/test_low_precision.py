"""AdamW with moments and parameters in bfloat16: equal to torch's in fp32, and it converges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.config.schema import OptimizerConfig
from titanlite.optim import low_precision
from titanlite.optim.low_precision import LowPrecisionAdamW
from titanlite.optim.optimizer import build_optimizer


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[float]:
    """Losses of a small regression."""
    generator, losses = torch.Generator().manual_seed(5), []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator).to(dtype)
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def regression(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)).to(dtype)


def test_adamw_in_low_precision_is_adamw_where_all_is_fp32(monkeypatch):
    """Cut into pieces too; weight decay and rate by group."""
    monkeypatch.setattr(low_precision, "CHUNK_NUMEL", 100)
    models = [regression(), regression()]
    groups = [
        [{"params": list(m[0].parameters()), "weight_decay": 0.3}, {"params": m[2].parameters()}]
        for m in models
    ]
    common = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    theirs = torch.optim.AdamW(groups[0], weight_decay=0.0, **common)
    ours = LowPrecisionAdamW(groups[1], dtype=torch.float32, **common)
    assert train(theirs, models[0], 20) == pytest.approx(train(ours, models[1], 20), rel=1e-6)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                theirs.state[a][name], ours.state[b][name], rtol=1e-5, atol=1e-9
            )


def test_with_all_in_bfloat16_torchs_fused_adamw_computes_the_same_bits():
    models = [regression(torch.bfloat16), regression(torch.bfloat16)]
    config = OptimizerConfig(lr=1e-2, state_dtype="bfloat16")
    theirs = build_optimizer([models[0]], config)
    groups = [{"params": list(models[1].parameters()), "weight_decay": config.weight_decay}]
    ours = LowPrecisionAdamW(groups, config.lr, config.betas, config.eps, torch.bfloat16)
    assert isinstance(theirs, torch.optim.AdamW)
    assert train(theirs, models[0], 20) == train(ours, models[1], 20)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(theirs.state[a][name], ours.state[b][name])


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_learns_too(weights, moments):
    model = regression(weights)
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.0, state_dtype=str(moments).removeprefix("torch.")
    )
    optimizer = build_optimizer([model], config)
    assert isinstance(optimizer, LowPrecisionAdamW) == (weights != moments)
    losses = train(optimizer, model, 200)
    assert losses[-1] < 0.1 * losses[0]
    for parameter in model.parameters():
        assert parameter.dtype == weights
        assert {optimizer.state[parameter][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {
            moments
        }


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_can_be_withheld_on_the_device(weights, moments):
    """A step with `found_inf` = 1 changes no bit, in fp32 too; others are those of an optimizer
    without it.
    """
    models = [regression(weights), regression(weights)]
    plain, other = (
        LowPrecisionAdamW(m.parameters(), 1e-2, (0.9, 0.95), 1e-8, moments, 0.1) for m in models
    )
    generator = torch.Generator().manual_seed(0)
    for step, withheld in enumerate([0.0, 0.0, 1.0, 0.0, 1.0, 0.0]):
        gradients = [
            torch.randn(p.shape, generator=generator).to(weights) for p in models[0].parameters()
        ]
        for p, gradient in zip(models[1].parameters(), gradients, strict=True):
            p.grad = gradient * float("nan") if withheld else gradient.clone()
        before = [t.clone() for p in models[1].parameters() for t in (p, *other.state[p].values())]
        other.found_inf = torch.tensor(withheld)
        other.step()
        after = [t for p in models[1].parameters() for t in (p, *other.state[p].values())]
        if withheld:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), step
            continue
        for p, gradient in zip(models[0].parameters(), gradients, strict=True):
            p.grad = gradient
        plain.step()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            tolerance = (
                {"rtol": 1e-6, "atol": 1e-8}
                if weights == torch.float32
                else {"rtol": 8e-3, "atol": 1e-4}
            )
            torch.testing.assert_close(a, b, **tolerance)
            assert float(plain.state[a]["step"]) == float(other.state[b]["step"])
