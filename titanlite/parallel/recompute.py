"""Activation checkpointing: forget activations in the forward, compute them again in the backward.

What it is: `torch.utils.checkpoint` around a block's forward. `full` keeps only the block's input (arXiv
1604.06174); `selective` also keeps attention's output and every second matmul, the results that cost most to
compute per byte (after arXiv 2205.05198).
What it costs, per block: `none` keeps every intermediate result and computes nothing twice; `full` keeps 2 * B * S * D
bytes in bf16 and adds one forward, a third of the step's compute; `selective` lies between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.config import Recompute

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_recompute(block: nn.Module, config: Recompute, index: int) -> None:
    """Replaces the forward of block number `index`, if the config asks for it. Names and parameters stay."""
    if config.mode == "none" or index % config.every:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.mode == "selective":
        options["context_fn"] = _keep_costly_results
    block.forward = functools.partial(checkpoint, block.forward, **options)


def _keep_costly_results() -> Any:
    """Contexts of one forward and its recomputation, each counting the matmuls from the start."""
    counts = {False: 0, True: 0}  # by whether this is the recomputation

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten.mm.default:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
