"""Activation checkpointing: forget activations in the forward, compute them again in the backward.

What it is: `torch.utils.checkpoint` around a block's forward, in three strengths, for all blocks or every n-th.
* `full` keeps only the block's input (arXiv 1604.06174).
* `selective` also keeps the results of the operators in SAVED and of every second matmul: those that cost most to
  compute, or to communicate, per byte (after arXiv 2205.05198).
* `memory_budget` leaves the choice to the compiler, which solves a knapsack of time against memory for each block.
With the first two nothing is asked of the compiler; `selective` and it work together.

What it costs, per block and microbatch: `none` keeps every intermediate result and computes nothing twice; `full`
keeps b B S D / (cp tp) bytes (b per number) and adds one forward, a third of the step's compute, with the
communication in it; the others lie between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._functorch.config
import torch.distributed.tensor  # registers its operators
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.config.schema import Recompute

aten = torch.ops.aten
SAVED = {  # by `selective`, besides every second of MATMULS
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,  # tensor parallel: else it would be sent again
    torch.ops._dtensor.shard_dim_alltoall.default,  # Ulysses
}
MATMULS = (aten.mm.default, aten._scaled_mm.default)  # in 16 or 32 bits, in 8


def apply_recompute(block: nn.Module, config: Recompute, index: int) -> None:
    """Replaces the forward of block number `index`, if the config asks for it. Names and parameters stay."""
    _set_budget(config.budget if config.mode == "memory_budget" else 1.0)
    if config.mode in ("none", "memory_budget") or index % config.every:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.mode == "selective":
        options["context_fn"] = _keep_costly_results
    block.forward = functools.partial(checkpoint, block.forward, **options)


def _set_budget(budget: float) -> None:
    """The part of the activations' memory that blocks compiled from here on may use (torch 2.11 to 2.13)."""
    functorch: Any = torch._functorch.config
    functorch.activation_memory_budget = budget
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        # Under tensor parallel a graph has meshes among its inputs, which have no size that matters.
        functorch.unsafe_treat_script_objects_as_zero_size = budget < 1


def _keep_costly_results() -> Any:
    """Contexts of one forward and its recomputation, each counting the matmuls from the start."""
    counts = {False: 0, True: 0}  # by whether this is the recomputation

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
