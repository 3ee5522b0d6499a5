"""Step 10: expert parallel. A router chooses 2 of 4 experts for each token; each rank has some.

    python learn/steps/10_experts.py 2

What is new: the feed-forward of a block is E small ones, the experts, of which rank r has the r-th
E/n. Each token is copied for the k experts that its router chooses, and the copies, the rows, are
sorted by expert. An all-to-all sends each row to the rank of its expert, a second one returns the
results. How many rows a rank gets is known only when all have routed, so the ranks exchange these
counts first. Everything else is data parallel, as in step 2.
What it costs: experts take 12 X / n bytes of X numbers, the rest 16 bytes for each number. Per
block an all-to-all of E counts, and two of 4 R D bytes in the forward and two in the backward, for
R = k B S / n rows, of which 1/n stay. No row is dropped.
Read next: docs/moe.md, the same in titanlite, with a loss that balances the experts.

The gradient of an expert needs no collective: its rank has computed the rows of all ranks, and
their losses are divided by the labels of all ranks. (GShard: arXiv 2006.16668)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, B, build_adamw, gradient_of, launch, read_step, summed_loss, update
from llama import Block, D, Llama, initial_value
from torch import Tensor, nn

ddp = import_module("2_ddp")  # a module whose name begins with a digit can't be imported by name

E, TOP, HIDDEN = 4, 2, 64  # experts, experts of a token (k), hidden units of an expert


class Exchange(torch.autograd.Function):
    """Sends the first sent[0] rows (R, D) to rank 0, the next sent[1] to rank 1, and so on.

    Returns the rows that arrive, received[r] of them from rank r, in the order of ranks. The
    gradient of a row goes back to the rank that sent it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        # gap: the exchange, and what happens between two of them
        ctx.sent, ctx.received = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received)
        return back, None, None


def compute_elsewhere(here: Mixture, rows: Tensor, counts: Tensor) -> Tensor:
    """Returns the results (R, D) of rows (R, D), computed by the ranks that have their experts.

    Rows are sorted by expert, counts (E,) of each. `here.compute` is for rows of experts here.
    """
    ranks = dist.get_world_size()
    received = torch.empty_like(counts)  # from each rank, for each expert here
    dist.all_to_all_single(received, counts)
    by_rank = received.view(ranks, E // ranks)
    sent_to = counts.view(ranks, E // ranks).sum(dim=1).tolist()
    got_from = by_rank.sum(dim=1).tolist()
    arrived = Exchange.apply(rows, sent_to, got_from)  # sorted by rank, then by expert
    own = torch.arange(E // ranks).repeat(ranks).repeat_interleave(received)  # expert of each row
    order = own.argsort(stable=True)  # by expert, then by rank
    results = here.compute(arrived[order], by_rank.sum(dim=0))
    results = results[order.argsort()]  # in the order in which they arrived
    return Exchange.apply(results, got_from, sent_to)
    # end of gap


class Mixture(nn.Module):
    """A router, and this rank's experts, each SwiGLU with HIDDEN units; a block's feed-forward."""

    w1: Tensor  # (E/n, F, D), as w3
    w2: Tensor  # (E/n, D, F)
    w3: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.router.weight.data = initial_value(f"{name}.router.weight", torch.Size((E, D)))
        shapes = {"w1": (E, HIDDEN, D), "w2": (E, D, HIDDEN), "w3": (E, HIDDEN, D)}
        for weight, shape in shapes.items():
            whole = initial_value(f"{name}.experts.{weight}.weight", torch.Size(shape))
            own = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
            setattr(self, weight, nn.Parameter(own))

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes rows that are sorted by the experts of this rank; counts (E/n,) of each."""
        results = []
        for i, part in enumerate(rows.split(counts.tolist())):
            hidden = F.silu(F.linear(part, self.w1[i])) * F.linear(part, self.w3[i])
            results.append(F.linear(hidden, self.w2[i]))
        return torch.cat(results)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(dim=-1).flatten(0, 1)  # (T, E), of T tokens
        # Stable: of equally probable experts the first are chosen, on every rank
        ranking = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = ranking.values[:, :TOP] / ranking.values[:, :TOP].sum(dim=-1, keepdim=True)
        numbers, order = ranking.indices[:, :TOP].flatten().sort(stable=True)  # expert of each row
        rows = x.flatten(0, 1).repeat_interleave(TOP, dim=0)[order]  # (R, D)
        results = compute_elsewhere(self, rows, numbers.bincount(minlength=E))
        by_token = results[order.argsort()].unflatten(0, (-1, TOP))  # (T, TOP, D)
        return (by_token * weights[..., None]).sum(dim=1).view_as(x)


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    rank, local = dist.get_rank(), B // dist.get_world_size()
    model = Llama()
    for name, block in model.layers.items():
        assert isinstance(block, Block)
        block.feed_forward = Mixture(f"layers.{name}.feed_forward")
    named = list(model.named_parameters())
    own = [weight for name, weight in named if ".feed_forward.w" in name]
    gradients = ddp.DDP(nn.ParameterList(w for name, w in named if ".feed_forward.w" not in name))
    gradients.last_batch = True
    optimizer, losses = build_adamw(model.parameters()), []
    for step in range(1, STEPS + 1):
        tokens, labels = (rows[rank * local : (rank + 1) * local] for rows in read_step(step))
        gradients.start_step()
        loss = summed_loss(model(tokens), labels)
        loss.backward()
        gradients.finish_step()
        square = sum((gradient_of(weight).square().sum() for weight in own), torch.zeros(()))
        total = torch.stack((square, loss.detach()))
        dist.all_reduce(total)  # each rank has other experts, and other labels
        update(optimizer, (total[0] + torch.cat(gradients.buckets).square().sum()).sqrt(), step)
        optimizer.zero_grad()
        losses.append(total[1].item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 4))

# With torch, and in titanlite:
#   Exchange, compute_elsewhere  torch.distributed.nn.functional.all_to_all_single
#                      titanlite/parallel/expert_parallel.py: AllToAll, DividedExperts
#   Mixture            torch.nn.functional.grouped_mm for the loop over experts
#                      titanlite/model/moe.py: Experts, MixtureOfExperts
