"""z-loss: keeps the denominator of the softmax near 1.

What it is: the loss plus coefficient * ln(Z)^2 for each target, where Z is the sum of exp(logit)
over the vocabulary (PaLM, arXiv 2204.02311, section 5). Like the loss it is a sum over targets;
ignored labels contribute nothing.
Why it is here: cross entropy does not change if all logits of a token grow alike. Without a bound
they can drift in a long run, and bfloat16 then rounds differences between them.
What it costs: ln(Z) is computed a second time, one pass over the logits, and its gradient is one
more tensor of their size, 4 B S V bytes. With tp each rank sums over its part of the vocabulary; an
all-gather of 4 B S bytes per rank combines the parts. Without gradients, in validation, the loss is
the cross entropy alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.data.rows import IGNORED
from titanlite.optim.loss import SummedLoss


def with_z_loss(loss: SummedLoss, coefficient: float, mesh: DeviceMesh) -> SummedLoss:
    """Adds z-loss to `loss` where gradients are computed.

    `mesh`: the tp axis, over which the vocabulary is sharded.
    """

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return loss(logits, labels)
        logits = logits.float()
        squares = log_partition(logits, mesh).square()  # (B, S)
        of_targets = torch.where(labels == IGNORED, 0.0, squares)
        return loss(logits, labels) + coefficient * of_targets.sum()

    return summed


def log_partition(logits: Tensor, mesh: DeviceMesh) -> Tensor:
    """Computes ln(Z) of each token: logits (B, S, V/tp) -> (B, S), equal on all ranks of tp."""
    own = torch.logsumexp(logits, dim=-1)  # over this rank's part of the vocabulary
    if mesh.size() == 1:
        return own
    parts = DTensor.from_local(own[None], mesh, [Shard(0)])  # globally (tp, B, S)
    gathered = parts.redistribute(placements=[Replicate()])
    # From here on all ranks compute the same, so the gradient of a rank's part is its own row of
    # the gradient of `gathered`.
    return torch.logsumexp(gathered.to_local(), dim=0)
