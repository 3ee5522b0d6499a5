"""Computes output projection and cross entropy together, one chunk of tokens at a time.

What it is: logits are V numbers for each token, by far the largest tensor of a step. Here the model
returns hidden states (`parallel/deferred_output.py`). For one chunk of tokens after the other, the
loss computes the logits, overwrites them with their gradient, a block of tokens at a time, and
computes from it the gradients of the hidden states and of the projection. The loss is a sum, so the
backward only multiplies these by the factor that it receives.
What it costs: nothing is computed twice. Memory: with n chunks 1/n of the logits; fp32 copy,
log-softmax and gradient of one block (12 bytes for each of its logits); and the gradients
of the hidden states and of the projection (fp32) until the backward.
Bits: the gradient of a block's logits has those of the loss at once. The loss and the projection's
gradient are sums over tokens, here sums of the chunks' sums, and the factor is multiplied last: so
they differ by rounding. `rules/loss_chunks.py` chooses the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.optim.loss import SummedLoss
from titanlite.rules.loss_chunks import BLOCK_NUMEL, CPU_BLOCK_NUMEL


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int, loss: SummedLoss
) -> Tensor:
    """Computes `loss(hidden @ weight.T, labels)` without holding all logits at once.

    hidden (B, S, D), weight (V, D), labels (B, S); `loss` must be a sum over tokens.
    """
    if torch.is_grad_enabled():
        result: Tensor = _Chunked.apply(hidden, weight, labels, num_chunks, loss)
        return result
    losses = []
    chunks = zip(token_chunks(hidden, num_chunks), token_chunks(labels, num_chunks), strict=True)
    for x, y in chunks:
        losses += [loss(*block) for block in token_blocks(F.linear(x, weight), y)]
    return torch.stack(losses).sum()


def token_chunks(values: Tensor, num_chunks: int) -> tuple[Tensor, ...]:
    """Splits (B, S, ...) into at most `num_chunks` tensors (1, tokens, ...)."""
    return values.flatten(0, 1)[None].chunk(num_chunks, dim=1)


def token_blocks(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields views of logits (1, n, V) and labels (1, n): of at most BLOCK_NUMEL logits, on a CPU
    CPU_BLOCK_NUMEL, or of one token.
    """
    rows = logits.shape[1]
    most = CPU_BLOCK_NUMEL if logits.is_cpu else BLOCK_NUMEL
    while rows > 1 and rows * logits.shape[2] > most:
        rows = -(-rows // 2)  # halves divide most numbers of tokens, so blocks are equal
    return zip(logits.split(rows, dim=1), labels.split(rows, dim=1), strict=True)


def replace_by_gradient(logits: Tensor, labels: Tensor, loss: SummedLoss) -> Tensor:
    """Returns the loss of logits (1, n, V) and labels (1, n), and overwrites the logits with its
    gradient.
    """
    total = torch.zeros((), device=logits.device)
    for block, targets in token_blocks(logits, labels):
        # A forward of autograd.Function runs without gradients. The leaf shares the logits' memory,
        # which its gradient overwrites when it is complete
        with torch.enable_grad():
            leaf = block.detach().requires_grad_()
            value = loss(leaf, targets)
        (gradient,) = torch.autograd.grad(value, leaf)
        block.copy_(gradient)
        total += value.detach()
    return total


class _Chunked(torch.autograd.Function):
    """Computes the gradients in the forward; the backward multiplies them by the factor it gets."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int, loss: SummedLoss
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        to_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)  # gradients
        projection = weight.detach()
        to_weight = None
        if ctx.needs_input_grad[1]:  # false if it is frozen
            to_weight = torch.zeros_like(weight, dtype=torch.float32)  # bfloat16 rounds each sum
        chunks = zip(
            token_chunks(hidden.detach(), num_chunks),
            token_chunks(labels, num_chunks),
            token_chunks(to_hidden, num_chunks),  # views, which `_one_chunk` fills
            strict=True,
        )
        for x, y, gradient in chunks:
            total += _one_chunk(x, projection, y, loss, gradient[0], to_weight)
        # A float16 weight keeps the fp32 sum: it is not scaled yet, and could overflow
        if to_weight is not None and weight.dtype != torch.float16:
            to_weight = to_weight.to(weight.dtype)
        ctx.save_for_backward(to_hidden, to_weight)
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        if to_weight is not None:
            to_weight = to_weight * factor
        return to_hidden * factor, to_weight, None, None, None


def _one_chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: SummedLoss,
    to_x: Tensor,
    to_weight: Tensor | None,
) -> Tensor:
    """Returns the loss of x (1, n, D) and labels (1, n); writes the gradient of `x` to `to_x` (n,
    D), and adds that of `weight` (V, D) to `to_weight`, in fp32.

    It is a function so that the logits are freed before those of the next chunk are computed.
    """
    logits = F.linear(x, weight)
    value = replace_by_gradient(logits, labels, loss)
    to_logits = logits[0]  # (n, V)
    torch.mm(to_logits, weight, out=to_x)
    if to_weight is None:
        return value
    if x.dtype == torch.float32:
        to_weight.addmm_(to_logits.T, x[0])
    elif x.is_cuda:
        # Adds the product before it is rounded, and needs no tensor for it
        torch.addmm(to_weight, to_logits.T, x[0], out_dtype=torch.float32, out=to_weight)
    else:
        to_weight += to_logits.T @ x[0]
    return value
