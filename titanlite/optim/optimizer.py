"""The optimizer over the model's parameters: AdamW, or Muon with AdamW.

What it is: torch.optim.AdamW (arXiv 1711.05101), fused by default; the AdamW of `low_precision.py`
if parameters and moments have different dtypes. With `optimizer.name = "muon"` the matrices of the
blocks belong to `muon.py`.
What it costs: two fp32 numbers per parameter (the moments); with fp32 parameters and gradients 16
bytes per parameter in all, or 8 if all are bfloat16, divided by the ranks that shard them.
The fused implementation reads and writes them in one pass, and computes in fp32. Weight decay acts
on all parameters by default, as in torchtitan; `optimizer.decayed = "linear"` excludes norms and
embeddings, as GPT-2 and nanoGPT do. `optimizer.groups` changes rate and decay by the names of
parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.config.schema import OptimizerConfig
from titanlite.optim.low_precision import LowPrecisionAdamW
from titanlite.optim.muon import Muon
from titanlite.optim.offload import OffloadedOptimizer

logger = logging.getLogger("titanlite")
Groups = list[dict[str, Any]]  # torch.optim's parameter groups


def build_optimizer(
    parts: Sequence[nn.Module], config: OptimizerConfig, offload: bool = False
) -> torch.optim.Optimizer:
    """Builds the optimizer of a model's parts; with `offload` its state is in CPU memory.

    Each parameter group has its peak learning rate as `peak_lr`.
    """
    matrices: list[tuple[str, Tensor]] = []  # for Muon
    others: list[tuple[str, Tensor]] = []
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                continue
            if config.uses_muon(name, parameter.ndim):
                matrices.append((name, parameter))
            else:
                others.append((name, parameter))

    optimizer = _build_adamw(_group(others, config), config)
    if config.name == "muon":
        optimizer = Muon(_group(matrices, config), optimizer, config)
    if offload:
        optimizer = OffloadedOptimizer(optimizer)
    return optimizer


def _group(parameters: list[tuple[str, Tensor]], config: OptimizerConfig) -> Groups:
    """Makes a group for each pair of weight decay and learning rate, the highest decay first.

    Experts that are divided over ep have another mesh than other parameters, and so another group:
    torch updates a group in one call, which needs DTensors of one mesh.
    """
    members: dict[tuple[float, float, DeviceMesh | None], list[Tensor]] = {}
    for name, parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decay, rate = _decay_and_rate(name, parameter, config)
        members.setdefault((decay, rate, mesh), []).append(parameter)
    if not parameters:  # nothing is trained, or Muon has all; torch needs a group
        members[0.0, config.lr, None] = []
    groups = []
    for key in sorted(members, key=lambda key: key[:2], reverse=True):
        decay, rate, _ = key
        of_group = members[key]
        groups.append({"params": of_group, "lr": rate, "peak_lr": rate, "weight_decay": decay})
    return groups


def _decay_and_rate(name: str, parameter: Tensor, config: OptimizerConfig) -> tuple[float, float]:
    """Returns weight decay and peak learning rate of a parameter."""
    is_linear = parameter.ndim >= 2 and not name.startswith("tok_embeddings")
    decay = config.weight_decay if is_linear or config.decayed == "all" else 0.0
    rate = config.lr
    for group in config.groups:
        if fnmatchcase(name, group.pattern):  # the first match decides
            if group.weight_decay is not None:
                decay = group.weight_decay
            if group.lr is not None:
                rate = group.lr
            break
    return decay, rate


def _build_adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    implementation = config.implementation
    if implementation == "auto":
        implementation = "fused"
    state_dtype = getattr(torch, config.state_dtype)
    parameters = [parameter for group in groups for parameter in group["params"]]
    dtypes = {state_dtype, *(parameter.dtype for parameter in parameters)}
    # torch's moments have the dtype of the parameter. If that is bfloat16, only torch's fused
    # implementation computes in fp32.
    stock = dtypes == {torch.float32} or (len(dtypes) == 1 and implementation == "fused")

    decayed = sum(len(group["params"]) for group in groups if group["weight_decay"] > 0)
    variant = implementation if stock else f"moments {config.state_dtype}"
    spared = len(parameters) - decayed
    logger.debug("AdamW (%s): %d tensors decay, %d do not", variant, decayed, spared)
    if not stock:
        return LowPrecisionAdamW(groups, config.lr, config.betas, config.eps, state_dtype)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
