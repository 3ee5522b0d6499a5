"""Forward and backward through the part of the model that this process holds.

What it is: the two calls the training loop makes, `forward_backward` for a microbatch and `evaluate` for a
validation batch. Without pipeline parallel the part is the whole model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanlite.optim.loss import cross_entropy_sum


class Stages:
    """What computes a loss from a batch of tokens and labels, both (B, S)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor) -> Tensor:
        """Adds to the gradients; returns this microbatch's summed loss over the step's global target count."""
        loss = cross_entropy_sum(self.model(tokens), labels) / num_targets
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of a batch."""
        return cross_entropy_sum(self.model(tokens), labels)
