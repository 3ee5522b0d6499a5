"""Activation checkpointing: drop activations in the forward, compute them again in the backward.

What it is: `torch.utils.checkpoint` around the forward of all blocks or of every n-th, in three
modes:
* `full` keeps only the block's input (arXiv 1604.06174).
* `selective` also keeps the results of the operators in SAVED and of every second matmul, which
  take the most computation or communication per byte kept (after arXiv 2205.05198).
* `memory_budget` leaves the choice to the compiler, which solves a knapsack of time against memory
  for each block.
`full` and `selective` work with and without the compiler. With experts `selective` chooses in
attention, and keeps of the mixture only the input: experts that are a unit of FSDP inside the block
call its hooks again, whose operators would not match those of the forward.

Why it is here: activations grow with the batch and the sequence, and can take more memory than
weights and moments. What it costs, per block and local batch: `none` keeps every intermediate
result and computes nothing twice; `full` keeps b B S D / (cp tp) bytes (b per number) and adds one
forward, a third of the step's compute; the other modes lie between these two. Recomputation also
repeats communication: both `full` and `selective` repeat the all-gathers of tp and cp, and `full`
repeats one of tp's two reduce-scatters. FSDP sends nothing more, because the backward has gathered
the block's weights anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.config.schema import RecomputeConfig
from titanlite.distributed.torch_private import (
    FUSED_ATTENTION,
    REDUCE_SCATTER,
    SCALED_MM,
    SHARD_ALL_TO_ALL,
)
from titanlite.model.wrappable import Wrappable
from titanlite.parallel.activation_offload import offload_input

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

# Operators whose results `selective` keeps, in addition to every second one of MATMULS
SAVED = {
    *FUSED_ATTENTION,
    REDUCE_SCATTER,  # tensor parallel: recomputing it would repeat the communication
    SHARD_ALL_TO_ALL,  # Ulysses: likewise
}
MATMULS = (torch.ops.aten.mm.default, SCALED_MM)  # the second multiplies float8


def apply_ac(model: Llama, config: RecomputeConfig) -> None:
    """Wraps the computation of every n-th block, for `full` and `selective`."""
    if config.mode in ("none", "memory_budget"):
        return
    for name, block in model.layers.items():
        if int(name) % config.every != 0:
            continue
        assert isinstance(block, Wrappable)
        if config.mode == "full":
            block.wrap(recomputed)
            if config.offload:
                block.wrap(offload_input)
        elif model.config.num_experts:
            attention = block.get_submodule("attention")
            mixture = block.get_submodule("feed_forward")
            assert isinstance(attention, Wrappable)
            assert isinstance(mixture, Wrappable)
            attention.wrap(recomputed, context_fn=_selective_contexts)
            mixture.wrap(recomputed)
        else:
            block.wrap(recomputed, context_fn=_selective_contexts)


def recomputed(computation: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Wraps a computation whose activations are dropped; `options` are those of `checkpoint`."""
    return functools.partial(checkpoint, computation, use_reentrant=False, **options)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts for one forward and for its recomputation.

    Matmuls are counted from zero in each.
    """
    counts = {False: 0, True: 0}  # key: whether this is the recomputation

    def policy(
        context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        if op in MATMULS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
