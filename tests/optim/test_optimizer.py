"""AdamW: which parameters decay, and that its implementations take the same step."""

from __future__ import annotations

import pytest
import torch
from model_builder import small_model

from titanlite.config.schema import OptimizerConfig
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
