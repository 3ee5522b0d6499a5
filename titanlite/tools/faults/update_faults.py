"""Faults between the backward and the end of a step: in clipping, scales and the optimizer.

What they have in common: loss and gradient of the first step are right, the weights after it are
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from titanlite.distributed.dtensor import local_gradient
from titanlite.model.llama import Llama
from titanlite.optim import muon
from titanlite.optim.loss_scale import LossScale
from titanlite.parallel import step
from titanlite.tools.faults.fault import Fault, replaced


def clipped_by_local_norm() -> AbstractContextManager[None]:
    original = step.clip_gradients

    def clip_gradients(parts: Sequence[Llama], max_norm: float, *others: Any) -> Tensor:
        norm = original(parts, 0.0, *others)  # measured over all ranks, and not clipped
        local = [local_gradient(parameter) for part in parts for parameter in part.parameters()]
        own = nn.utils.get_total_norm(local)  # of this rank's shards
        for gradient in local:
            gradient.mul_((max_norm / own).clamp(max=1))
        return norm

    return replaced(step, "clip_gradients", clip_gradients)


def gradients_keep_their_scale() -> AbstractContextManager[None]:
    return replaced(LossScale, "unscale", lambda self: None)


def muon_of_shards() -> AbstractContextManager[None]:
    return replaced(muon, "_axes", lambda matrix: [])


UPDATE_FAULTS = (
    Fault(
        "clip-by-local-norm",
        "Gradients are clipped by the norm of this rank's shards",
        clipped_by_local_norm,
        layout="dp_shard=2,training.max_norm=0.1",
        figure="loss",
        step=2,
        unchanged=("gradient",),
        threads=(),
        why="""The norm that is logged is the right one, but each rank scales its shards by
their own norm. A shard's norm is smaller than that of all shards, so gradients stay too large, by
another factor on each rank. The first loss, gradient and norm are right; the weights after them
are not.""",
    ),
    Fault(
        "scale-in-norm",
        "Gradients still have the loss scale when they are clipped and used",
        gradients_keep_their_scale,
        layout="dp_shard=2,training.compute_dtype=float16",
        figure="grad_norm",
        step=1,
        unchanged=("gradient",),
        threads=(),
        why="""In float16 the loss is multiplied by 65,536 so that small gradients are not
rounded to zero, and gradients have to be divided by it before they are clipped. Without the
division the norm is 65,536 times too large, so every step is clipped to `max_norm`. Clipping and
AdamW both divide by the size of the gradient, so the weights hardly show the factor; the norm that
is logged does.""",
    ),
    Fault(
        "muon-of-shards",
        "Muon orthogonalises each rank's rows in place of the whole matrix",
        muon_of_shards,
        layout="dp_shard=2,optimizer.name=muon,optimizer.lr=0.006",
        figure="loss",
        step=2,
        unchanged=("gradient",),
        threads=(),
        why="""AdamW works on single numbers, so a rank can update its shard alone. Muon replaces
the whole matrix by the nearest orthogonal one, and each row of that depends on all rows. Two halves
that were made orthogonal separately are not orthogonal to each other. Gradients are right, the
update is not.""",
    ),
)
