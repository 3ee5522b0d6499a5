"""Step 5: tensor parallel (TP). Each rank computes a part of every layer, for the whole batch.

    python learn/steps/5_tensor_parallel.py 2

What is new: of the first matrix of a pair a rank has some output rows (wq, wk, wv: its heads; w1,
w3: its hidden units), of the second one the matching input columns (wo, w2). Between them nothing
is sent. The second gives a partial sum; a reduce-scatter adds those of all ranks and leaves each
rank some of the tokens. So norms and residuals work on S / n tokens (sequence parallel), and an
all-gather restores the sequence before the next pair. Embedding and output are divided by the
vocabulary; the loss works on V / n logits, and sends 3 numbers of each token instead of V.
What it costs: 16 N / n bytes, norms excepted. Per block 2 all-gathers and 2 reduce-scatters of
4 B S D bytes in the forward, one pair more for the two ends, as many in the backward. They are
waited for, so a group belongs on one node. (Megatron-LM: arXiv 1909.08053, 2205.05198)
Read next: 6_fsdp_tp.py, which joins this step with step 4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, TARGETS, build_adamw, gradient_of, launch, read_step, update
from llama import Llama
from tokens import all_gather, reduce_scatter
from torch import Tensor, nn

# The dimension along which a weight is divided: 0 its outputs, 1 its inputs
PLAN = dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "tok_embeddings", "output"), 0)
PLAN |= {"wo": 1, "w2": 1}


class GatherTokens(torch.autograd.Function):
    """Before a divided layer: (B, S/n, D) -> (B, S, D).

    Every rank computes with all tokens, so the gradient of a token is the sum over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # gap: the collectives of the backward, and the loss
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """After a divided layer: (B, S, D), a partial sum -> the sum over the ranks, (B, S/n, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group), None


class VocabularyLoss(torch.autograd.Function):
    """logits (B, S, V/n), own labels (B, S) -> the summed cross entropy, the same on every rank.

    own: the labels counted from the first token id of this rank; < 0 or >= V/n on another rank.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        here = (own >= 0) & (own < logits.shape[-1])  # (B, S): this rank has the label's logit
        index = own.where(here, 0)[..., None]
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)  # so that exp can't overflow
        exponents = (logits - largest[..., None]).exp()
        label = (logits.gather(-1, index)[..., 0] - largest) * here
        sums = torch.stack((exponents.sum(-1), label))  # (2, B, S): two sums in one all-reduce
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponents / sums[0][..., None], index, here)
        return (sums[0].log() - sums[1]).sum()
        # end of gap

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, index, here = ctx.saved_tensors  # its gradient: softmax - 1 at the label
        softmax = softmax.scatter_add(-1, index, -here[..., None].to(softmax.dtype))
        return softmax * gradient, None, None


def apply_tp(model: Llama, group: dist.ProcessGroup | None = None) -> None:
    """Divides the model among the ranks of a group."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in PLAN:
            part = module.weight.detach().chunk(ranks, dim=PLAN[last])[rank]
            module.weight = nn.Parameter(part.clone())
        if last in ("attention", "feed_forward", "output"):
            module.register_forward_pre_hook(lambda _, x: GatherTokens.apply(x[0], group))
        if last in ("wo", "w2"):
            module.register_forward_hook(lambda _, x, out: ScatterTokens.apply(out, group))
        if last.endswith("norm"):  # whole on every rank, which has seen its own tokens only
            module.weight.register_post_accumulate_grad_hook(
                lambda weight: dist.all_reduce(weight.grad, group=group)
            )
    embedding = model.tok_embeddings.weight
    assert isinstance(embedding, Tensor)

    def embed(tokens: Tensor) -> Tensor:
        """Zeros for the ids of other ranks; the sum over the ranks is the embedding."""
        own = tokens - rank * len(embedding)
        here = (own >= 0) & (own < len(embedding))
        rows = F.embedding(own.where(here, 0), embedding) * here[..., None]
        return ScatterTokens.apply(rows, group)

    model.tok_embeddings.forward = embed


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    model = Llama()
    apply_tp(model)
    optimizer = build_adamw(model.parameters())
    losses = []
    for step in range(1, STEPS + 1):
        tokens, labels = read_step(step)  # all of it on every rank
        logits = model(tokens)  # (B, S, V/n)
        own = labels - dist.get_rank() * logits.shape[-1]
        loss = VocabularyLoss.apply(logits, own, None) / TARGETS
        losses.append(loss.item())
        loss.backward()
        square = torch.zeros(())
        for weight in model.parameters():
            holders = dist.get_world_size() if weight.ndim == 1 else 1  # of each number
            square += gradient_of(weight).square().sum() / holders
        dist.all_reduce(square)
        update(optimizer, square.sqrt(), step)
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2))  # it has 2 key/value heads

# With torch, and in titanlite:
#   PLAN, apply_tp  ColwiseParallel, RowwiseParallel and SequenceParallel in parallelize_module
#                   titanlite/parallel/tensor_parallel.py: block_plan, apply_tp
#   VocabularyLoss  torch.distributed.tensor.parallel.loss_parallel
#                   titanlite/parallel/tensor_parallel.py: loss_parallel_cross_entropy_sum
