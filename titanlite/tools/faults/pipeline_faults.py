"""Faults of pipeline parallelism: in work that the stages share, and in work of a single stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.optim import clip
from titanlite.parallel import pipeline_parallel, stages
from titanlite.tools.faults.fault import Fault, replaced


def tied_gradient_missing() -> AbstractContextManager[None]:
    return replaced(stages, "sum_shared_gradients", lambda params, mesh: None)


def divided_by_microbatches() -> AbstractContextManager[None]:
    def with_default_scaling(name: str) -> Callable[..., Any]:
        schedule = get_schedule_class(name)

        def build(*arguments: Any, scale_grads: bool, **options: Any) -> Any:
            return schedule(*arguments, **options)  # torch's default of scale_grads is True

        return build

    return replaced(pipeline_parallel, "get_schedule_class", with_default_scaling)


def clipped_per_stage() -> AbstractContextManager[None]:
    return replaced(clip, "is_alone", lambda: True)


PIPELINE_FAULTS = (
    Fault(
        "tied-embedding",
        "Each end of a tied embedding keeps its own gradient",
        tied_gradient_missing,
        layout="pp=2",
        figure="gradient",
        step=1,
        threads=("pytorch/torchtitan#3764",),
        why="""The first stage embeds tokens with the table, the last one computes logits with
it, and each has a copy. The gradient of the table is the sum of both. Without the sum the copies
become different tables after the first update, and an exported model can hold only one of them.""",
    ),
    Fault(
        "divided-by-microbatches",
        "The schedule divides gradients by the number of microbatches",
        divided_by_microbatches,
        layout="pp=2",
        figure="gradient",
        step=1,
        threads=(),
        why="""torch's schedules divide `.grad` by the number of microbatches unless `scale_grads`
is False, which is right for a loss that is the mean of a microbatch. Here the loss is already
divided by the number of targets of the whole step. And a step has two local batches: `.grad` is
divided after each of them, so that the first one is divided twice and hardly counts.""",
    ),
    Fault(
        "clip-per-stage",
        "Each pipeline stage clips by the norm of its own gradients",
        clipped_per_stage,
        layout="pp=2,training.max_norm=0.1",
        figure="grad_norm",
        step=1,
        unchanged=("gradient",),
        threads=("pytorch/torchtitan#596", "Modalities/modalities#313"),
        why="""The norm is over all parameters, so the squares of all stages have to be added.
The norm of a stage is smaller. Each stage scales its gradients by another factor, which changes
the direction of the update; gradients before clipping are right.""",
    ),
)
