"""Output projection and cross entropy for one chunk of tokens at a time.

What it is: the summed loss of hidden states, without all logits at once.
What it costs: with n chunks 1/n of the memory of logits, log-softmax and gradient. For 1/n of the
tokens at a time, it computes the logits, their loss and its gradients, and frees the logits. The
loss is a sum, so the backward only multiplies these gradients by the factor that it receives, and
nothing is computed twice. The gradients of the hidden states and of the projection are kept until
the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.optim.loss import SummedLoss


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int, loss: SummedLoss
) -> Tensor:
    """`loss(hidden @ weight.T, labels)` without holding all logits at once.

    hidden (B, S, D), weight (V, D), labels (B, S); `loss` must be a sum over tokens.
    """
    if torch.is_grad_enabled():
        result: Tensor = _Chunked.apply(hidden, weight, labels, num_chunks, loss)
        return result
    parts = zip(_token_chunks(hidden, num_chunks), _token_chunks(labels, num_chunks), strict=True)
    return torch.stack([loss(F.linear(x, weight), y) for x, y in parts]).sum()


def _token_chunks(values: Tensor, num_chunks: int) -> tuple[Tensor, ...]:
    """(B, S, ...) -> at most `num_chunks` tensors (1, tokens, ...)."""
    return values.flatten(0, 1)[None].chunk(num_chunks, dim=1)


class _Chunked(torch.autograd.Function):
    """Computes the gradients in the forward; the backward multiplies them by the incoming factor."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int, loss: SummedLoss
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        to_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        # a sum in bfloat16 would be rounded after each chunk
        to_weight = torch.zeros_like(weight, dtype=torch.float32)
        projection = weight.detach().requires_grad_()
        chunks = (
            _token_chunks(values, num_chunks) for values in (hidden.detach(), labels, to_hidden)
        )
        for x, y, gradient in zip(*chunks, strict=True):
            with torch.enable_grad():
                x.requires_grad_()
                value = loss(F.linear(x, projection), y)
                x_gradient, weight_gradient = torch.autograd.grad(value, (x, projection))
            total += value.detach()
            gradient.copy_(x_gradient)
            to_weight += weight_gradient
        # not float16: the sum is not scaled yet, and could overflow
        ctx.save_for_backward(
            to_hidden, to_weight if weight.dtype == torch.float16 else to_weight.to(weight.dtype)
        )
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * factor, to_weight * factor, None, None, None
