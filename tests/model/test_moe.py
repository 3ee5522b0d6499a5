"""The mixture of experts is that of its definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from model_builder import SMALL, small_model

from titanlite.model.flavors import FLAVORS, parameter_shapes
from titanlite.model.flops import flops_per_token
from titanlite.model.moe import MixtureOfExperts, choose, count

EXPERTS = dataclasses.replace(
    SMALL, qk_norm=True, num_experts=6, experts_per_token=2, expert_ffn_dim=24
)


def by_definition(moe: MixtureOfExperts, token: torch.Tensor) -> torch.Tensor:
    """The output for one token (D,): a loop over its experts."""
    shares = torch.softmax(moe.router.weight @ token, dim=0)
    best = shares.detach().topk(moe.experts_per_token).indices.tolist()
    total = sum(shares[expert] for expert in best)
    result = torch.zeros_like(token)
    for expert in best:
        w1, w2, w3 = (
            linear.weight[expert] for linear in (moe.experts.w1, moe.experts.w2, moe.experts.w3)
        )
        result = result + shares[expert] / total * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
    return result


@pytest.mark.parametrize("width", [24, 35])  # 35 is not one that `grouped_mm` has
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_and_gradients_are_those_of_the_definition(dtype, width):
    config = dataclasses.replace(EXPERTS, expert_ffn_dim=width)
    moe = small_model(config=config).layers["1"].feed_forward.to(dtype)
    torch.manual_seed(0)
    x = torch.randn(2, 7, 32, dtype=dtype, requires_grad=True)
    # No token chooses expert 3, and most choose 0
    with torch.no_grad():
        moe.router.weight[3] = -10 * x.flatten(0, 1).sum(0)
        moe.router.weight[0] *= 3
    out = moe(x)
    expected = torch.stack([by_definition(moe, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-7)
    weights = torch.randn_like(out)
    inputs = [x, *moe.parameters()]
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for a, b in zip(found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_of_equally_probable_experts_those_with_lower_numbers_are_chosen():
    probabilities = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25]])
    weights, experts = choose(probabilities, 2)
    assert experts.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert count(torch.tensor([0, 0, 1, 3, 3, 3]), 5).tolist() == [2, 1, 0, 3, 0]


def test_parameters_are_counted_with_and_without_the_experts_that_a_token_does_not_use():
    """The numbers of Qwen3-30B-A3B are those in its model card: 30.5 billion, 3.3 activated."""
    model = small_model(config=EXPERTS)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == parameter_shapes(EXPERTS)
    assert EXPERTS.num_parameters == sum(p.numel() for p in model.parameters())
    unused = sum(p.numel() * 4 // 6 for name, p in model.named_parameters() if ".experts." in name)
    assert EXPERTS.num_active_parameters == EXPERTS.num_parameters - unused
    used = EXPERTS.num_active_parameters - 101 * 32  # the embedding is a lookup
    assert flops_per_token(EXPERTS, 16) == 6 * used + 12 * 32 * 16 * 3
    qwen = FLAVORS["qwen3_30b_a3b"]
    assert round(qwen.num_parameters / 1e9, 1) == 30.5
    assert round(qwen.num_active_parameters / 1e9, 2) == 3.35
