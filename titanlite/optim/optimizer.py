"""AdamW over the model's parameters.

What it is: torch.optim.AdamW (arXiv 1711.05101), fused by default; the AdamW of `low_precision.py` if moments or
parameters are not fp32.
What it costs: two fp32 numbers per parameter (the moments); with fp32 parameters and gradients 16 bytes per
parameter in all, divided by the ranks that shard them. The fused implementation reads and writes them in one pass.
Weight decay acts on all parameters by default, as in torchtitan; `optimizer.decayed = "linear"` excludes norms
and embeddings, as GPT-2 and nanoGPT do.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import OptimizerConfig

logger = logging.getLogger("titanlite")


def build_optimizer(parts: list[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the parts of a model: one parameter group, or two if only the linear layers decay."""
    implementation = "fused" if config.implementation == "auto" else config.implementation
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in (named for part in parts for named in part.named_parameters()):
        linear = parameter.ndim == 2 and not name.startswith("tok_embeddings")
        (decayed if linear or config.decayed == "all" else spared).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    dtypes = {parameter.dtype for parameter in (*decayed, *spared)} | {getattr(torch, config.state_dtype)}
    low = dtypes != {torch.float32}
    variant = "moments " + config.state_dtype if low else implementation
    logger.info("AdamW (%s): %d tensors decay, %d do not", variant, len(decayed), len(spared))
    if low:
        groups = [group for group in groups if group["params"]]
        from titanlite.optim.low_precision import LowPrecisionAdamW

        return LowPrecisionAdamW(groups, config.lr, config.betas, config.eps, getattr(torch, config.state_dtype))
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
