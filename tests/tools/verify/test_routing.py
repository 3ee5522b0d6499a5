"""The reference's auxiliary loss and counts are those of the choices that the model makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_builder import SMALL, small_model

from titanlite.tools.verify.routing import Routing

EXPERTS = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2, expert_ffn_dim=24)


def test_equal_loads_cost_k_and_skewed_ones_more():
    model = small_model(config=EXPERTS)
    routing = Routing(model, weight=0.5)
    tokens = torch.randint(101, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens)
    assert float(routing.loss(16).detach()) == pytest.approx(
        0.5 * 2
    )  # f is k / E in the first step
    for name, block in model.layers.items():
        probabilities = routing.logits[name][0].softmax(dim=-1)
        chosen = probabilities.sort(dim=-1, descending=True).indices[:, :2]
        counts = torch.stack([(chosen == expert).sum() for expert in range(4)])
        assert block.feed_forward.num_experts == 4
        routing.loads[name] = counts / 16
    skewed = float(routing.loss(16).detach())
    assert skewed > 0.5 * 2
    expected = {name: load * 16 for name, load in routing.loads.items()}
    routing.finish_step()
    for name, counts in routing.chosen.items():
        assert counts.sum() == 2 * 16
        assert torch.equal(counts.float(), expected[name])


def test_a_dense_model_has_no_router():
    model = small_model()
    routing = Routing(model, weight=0.5)
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert routing.loss(4) == 0
    routing.finish_step()
    assert routing.chosen == {}
