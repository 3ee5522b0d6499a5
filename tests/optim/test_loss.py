"""Cross entropy summed over targets, against its definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model_builder import small_model

from titanlite.optim.loss import cross_entropy_sum


def test_loss_is_a_sum_over_targets_in_fp32():
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = -100
    expected = -sum(
        logits[b, s].log_softmax(-1)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] >= 0
    )
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32
    assert cross_entropy_sum(logits, torch.full((2, 5), -100)) == 0


def test_sum_over_global_count_weighs_tokens_alike():
    """Two microbatches of unequal target counts give the gradient of their joint mean."""
    model = small_model()
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0, 2:] = -100
    for i in range(2):
        (cross_entropy_sum(model(tokens[i : i + 1]), labels[i : i + 1]) / 11).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)
