"""AdamW: which parameters decay, moments in bfloat16, states in CPU memory."""

from __future__ import annotations

import pytest
import torch
from model_builder import small_model
from torch import nn

from titanlite.config.schema import OptimizerConfig
from titanlite.optim import low_precision, offload
from titanlite.optim.low_precision import LowPrecisionAdamW
from titanlite.optim.optimizer import build_optimizer


def test_what_decays():
    model = small_model()
    everything = build_optimizer([model], OptimizerConfig())
    assert [len(group["params"]) for group in everything.param_groups] == [30]
    decayed, spared = build_optimizer([model], OptimizerConfig(decayed="linear")).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in spared["params"]} == {
        "tok_embeddings",
        "attention_norm",
        "ffn_norm",
        "norm",
    }
    assert "output.weight" in {names[id(p)] for p in decayed["params"]}


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "for-loop"])
def test_implementations_give_the_same_step(implementation):
    def stepped(name: str) -> list[torch.Tensor]:
        model = small_model()
        optimizer = build_optimizer([model], OptimizerConfig(lr=0.1, implementation=name))
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach() * 100) + 0.1
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    for mine, other in zip(stepped(implementation), stepped("for-loop"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_auto_is_fused():
    optimizer = build_optimizer([small_model()], OptimizerConfig())
    assert optimizer.param_groups[0]["fused"] is True


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


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_pieces_hold_few_parameters_and_withhold_an_update_together(monkeypatch, state):
    monkeypatch.setattr(offload, "PIECE_NUMEL", 20)
    models = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
        )
        options = OptimizerConfig(decayed="linear", state_dtype=state)
        optimizer = build_optimizer([model], options, offloaded)
        if offloaded:
            pieces = offload.pieces(optimizer.param_groups)
            sizes = [sum(p.numel() for group in piece for p in group["params"]) for piece in pieces]
            assert sizes == [12, 24, 17], "a tensor is not divided"
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for step in range(4):
            if state == "float32":
                optimizer.found_inf = torch.tensor(float(step == 2))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * (step + 1)
            optimizer.step()
        assert len(calls) == 4
        models.append(
            [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        )
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
