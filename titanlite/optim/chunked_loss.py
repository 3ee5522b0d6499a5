"""Computes output projection and cross entropy together, one chunk of tokens at a time.

What it is: logits are V numbers for each token, by far the largest tensor of a step. Here the model
returns hidden states (`parallel/deferred_output.py`). For one chunk of tokens after the other, the
loss computes the logits, their loss and its gradients, and frees the logits. The loss is a sum, so
the backward only multiplies these gradients by the factor that it receives.
What it costs: nothing is computed twice. Memory: with n chunks 1/n of the logits, their log-softmax
and gradient; and the gradients of the hidden states and of the projection (fp32) until the
backward. Under tensor parallel the hidden states (B, S, D) are all-gathered, as they are for an
output layer. The last FSDP unit keeps its weights gathered after the forward, since the loss uses
them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.optim.loss import SummedLoss


class OutputWeight(Protocol):
    """The output layer of a model that returns hidden states."""

    @property
    def projection(self) -> Tensor:
        """Returns the matrix (V, D), or this rank's rows of it as a DTensor."""


class ChunkedLoss:
    """The summed loss of hidden states (B, S/tp, D) and labels (B, S), equal on all ranks of tp."""

    def __init__(
        self, output: OutputWeight, num_chunks: int, loss: SummedLoss, mesh: DeviceMesh
    ) -> None:
        """`loss`: the function of logits (B, S, V/tp) and labels; `mesh`: the tp axis."""
        self.output = output
        self.num_chunks = num_chunks
        self.loss = loss
        self.mesh = mesh

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.output.projection
        if self.mesh.size() > 1:
            sharded = DTensor.from_local(hidden, self.mesh, [Shard(1)])
            gathered = sharded.redistribute(placements=[Replicate()])
            # Each rank has logits for its part of the vocabulary, so its gradient of `hidden` is
            # one term of a sum.
            hidden = gathered.to_local(grad_placements=[Partial()])  # (B, S, D)
            assert isinstance(weight, DTensor)
            weight = weight.to_local()  # (V/tp, D)
        return chunked_cross_entropy_sum(hidden, weight, labels, self.num_chunks, self.loss)


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
        losses.append(loss(F.linear(x, weight), y))
    return torch.stack(losses).sum()


def token_chunks(values: Tensor, num_chunks: int) -> tuple[Tensor, ...]:
    """Splits (B, S, ...) into at most `num_chunks` tensors (1, tokens, ...)."""
    return values.flatten(0, 1)[None].chunk(num_chunks, dim=1)


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
    with torch.enable_grad():
        logits = F.linear(x.requires_grad_(), weight)
        of_logits = get_gradient_edge(logits)
        value = loss(logits, labels)
    del logits  # the loss keeps what its backward reads
    (to_logits,) = torch.autograd.grad(value, of_logits)
    to_logits = to_logits[0]  # (n, V)
    torch.mm(to_logits, weight, out=to_x)
    if to_weight is not None and x.is_cuda and x.dtype != torch.float32:
        # Adds the product before it is rounded, and needs no tensor for it
        torch.addmm(to_weight, to_logits.T, x[0], out_dtype=torch.float32, out=to_weight)
    elif to_weight is not None:
        to_weight += to_logits.T @ x[0]
    return value.detach()
