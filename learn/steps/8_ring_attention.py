"""Step 8: context parallel with ring attention. Each rank has a part of every sequence.

    python learn/steps/8_ring_attention.py 2

What is new: all layers but attention treat tokens separately, so a rank can compute its S / n
tokens alone. In attention its queries need the keys and values of all earlier tokens. These go
around in a ring: n times each rank attends to the block of keys and values that it has, and passes
it on. The parts are joined with an online softmax: when a later block has a larger score, what was
added up so far is scaled down.
What it costs: 16 N bytes as in step 2, but activations are those of S / n tokens, and scores those
of one block: B H (S/n)^2 numbers. Per layer and forward n - 1 messages of 8 B K Dh S / n bytes
(keys and values in fp32); in the backward n of twice that, because gradients go around too. The
gradients of the weights are summed over the ranks as in step 2.
Read next: 9_checkpoint.py, which saves a model that is divided.

With a causal mask rank 0 needs one block and the last rank all n: real systems give each rank an
early and a late part. Ring attention (arXiv 2310.01889), online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from common import STEPS, S, build_adamw, launch, read_step, summed_loss, update
from llama import DH, Block, H, K, Llama
from torch import Tensor

ddp = import_module("2_ddp")  # a module whose name begins with a digit can't be imported by name


def scores_of(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    """q (B, K, H/K, S/n, Dh), k (B, K, S/n, Dh) -> (B, K, H/K, S/n, S/n).

    diagonal: the keys are those of the queries' own tokens, so later ones are masked.
    """
    scores = q @ k[:, :, None].transpose(-1, -2) * DH**-0.5
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def rotate(x: Tensor) -> Tensor:
    """Sends `x` to the next rank of the ring; returns what the rank before has sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return x
    received = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    assert work is not None
    work.wait()
    return received


class RingAttention(torch.autograd.Function):
    """q (B, K, H/K, S/n, Dh), k and v (B, K, S/n, Dh): this rank's tokens -> as q.

    At turn i a rank has the keys and values of rank `rank - i`; those of later ranks are of later
    tokens, and are passed on unused.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # gap: the ring and the online softmax
        rank, ranks = dist.get_rank(), dist.get_world_size()
        held = torch.stack((k, v))  # in one message
        out = torch.zeros_like(q)
        total = torch.zeros_like(q[..., :1])  # of the exponents
        largest = torch.full_like(total, -torch.inf)  # of the scores so far
        for turn in range(ranks):
            if turn > 0:
                held = rotate(held)
            if turn > rank:
                continue
            scores = scores_of(q, held[0], diagonal=turn == 0)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            scale = (largest - new_largest).exp()  # of what was added up before
            exponents = (scores - new_largest).exp()
            out = out * scale + exponents @ held[1][:, :, None]
            total = total * scale + exponents.sum(-1, keepdim=True)
            largest = new_largest
        out = out / total
        ctx.save_for_backward(q, k, v, out, largest + total.log())
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_total = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        held = torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))  # with their gradients
        grad_q = torch.zeros_like(q)
        inner = (grad_out * out).sum(-1, keepdim=True)  # of the softmax's gradient
        for turn in range(ranks):
            if turn <= rank:
                softmax = (scores_of(q, held[0], diagonal=turn == 0) - log_total).exp()
                grad_scores = grad_out @ held[1][:, :, None].transpose(-1, -2) - inner
                grad_scores = softmax * grad_scores * DH**-0.5
                grad_q += grad_scores @ held[0][:, :, None]
                held[2] += (grad_scores.transpose(-1, -2) @ q).sum(2)  # over the H/K query heads
                held[3] += (softmax.transpose(-1, -2) @ grad_out).sum(2)
            held = rotate(held)  # after n turns the gradients are with their tokens again
        # end of gap
        return grad_q, held[2], held[3]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of `causal_attention`: q (B, H, S/n, Dh), k and v (B, K, S/n, Dh) -> as q."""
    return RingAttention.apply(q.unflatten(1, (K, H // K)), k, v).flatten(1, 2)


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    local = S // dist.get_world_size()  # tokens of each sequence
    start = dist.get_rank() * local
    model = Llama()
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.attention.attend = attend
        block.attention.start = start  # for RoPE: a token keeps its position
    optimizer = build_adamw(model.parameters())
    gradients = ddp.DDP(model)
    gradients.last_batch = True
    losses = []
    for step in range(1, STEPS + 1):
        tokens, labels = (rows[:, start : start + local] for rows in read_step(step))
        gradients.start_step()
        loss = summed_loss(model(tokens), labels)
        loss.backward()
        gradients.finish_step()
        update(optimizer, torch.cat(gradients.buckets).norm(), step)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   RingAttention  torch.distributed.tensor.experimental.context_parallel
#                  titanlite/parallel/context_parallel.py: AllGatherAttention
#   two parts of the sequence for each rank  titanlite/parallel/context_parallel.py: own_chunks
