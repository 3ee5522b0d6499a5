"""The optimizer over the model's parameters: AdamW, or Muon with AdamW.

What it is: torch.optim.AdamW (arXiv 1711.05101), fused by default; the AdamW of `low_precision.py`
if moments or parameters are not fp32. With `optimizer.name = "muon"` the matrices of the blocks
belong to `muon.py`.
What it costs: two fp32 numbers per parameter (the moments); with fp32 parameters and gradients 16
bytes per parameter in all, divided by the ranks that shard them. The fused implementation reads and
writes them in one pass. Weight decay acts on all parameters by default, as in torchtitan;
`optimizer.decayed = "linear"` excludes norms and embeddings, as GPT-2 and nanoGPT do.
`optimizer.groups` changes rate and decay by the names of parameters.
"""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import GroupConfig, OptimizerConfig

logger = logging.getLogger("titanlite")
Groups = list[dict[str, Any]]


def build_optimizer(
    parts: list[Any], config: OptimizerConfig, offload: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over the parts of a model; with `offload` its state is in CPU memory.

    Its parameter groups have the peak learning rate as `peak_lr`.
    """
    if not offload:
        return _build(parts, config)
    from titanlite.optim.offload import OffloadedOptimizer

    return OffloadedOptimizer(_build(parts, config))


def _build(parts: list[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    groups: dict[bool, dict[tuple[float, float], list[Tensor]]] = {True: {}, False: {}}
    for name, parameter in (named for part in parts for named in part.named_parameters()):
        matrix = config.name == "muon" and parameter.ndim == 2 and name.startswith("layers.")
        groups[matrix].setdefault(_rate_and_decay(name, parameter, config), []).append(parameter)
    matrices, others = (
        [
            {"params": p, "lr": rate, "peak_lr": rate, "weight_decay": decay}
            for (decay, rate), p in found
        ]
        for found in (sorted(groups[matrix].items(), reverse=True) for matrix in (True, False))
    )
    adamw = _build_adamw(others, config)
    if config.name == "muon":
        from titanlite.optim.muon import Muon

        return Muon(matrices, adamw, config)
    return adamw


def _rate_and_decay(name: str, parameter: Tensor, config: OptimizerConfig) -> tuple[float, float]:
    """Weight decay and peak learning rate of a parameter."""
    group = next(
        (group for group in config.groups if fnmatchcase(name, group.pattern)), GroupConfig()
    )
    linear = parameter.ndim == 2 and not name.startswith("tok_embeddings")
    decay = config.weight_decay if linear or config.decayed == "all" else 0.0
    return (
        decay if group.weight_decay < 0 else group.weight_decay,
        config.lr if group.lr < 0 else group.lr,
    )


def _build_adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    implementation = "fused" if config.implementation == "auto" else config.implementation
    parameters = [(p, group["weight_decay"]) for group in groups for p in group["params"]]
    low = {p.dtype for p, _ in parameters} | {getattr(torch, config.state_dtype)} != {torch.float32}
    variant = "moments " + config.state_dtype if low else implementation
    decayed = sum(decay > 0 for _, decay in parameters)
    logger.debug(
        "AdamW (%s): %d tensors decay, %d do not", variant, decayed, len(parameters) - decayed
    )
    if low:
        from titanlite.optim.low_precision import LowPrecisionAdamW

        return LowPrecisionAdamW(
            groups, config.lr, config.betas, config.eps, getattr(torch, config.state_dtype)
        )
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
