"""The order in which techniques are applied to an untouched model.

Each is a function that changes modules in place. The order matters: recomputation wraps a block's forward,
the compiler then sees both as one graph, and sharding's hooks stay outside of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config import Config
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.recompute import apply_recompute
from titanlite.parallel.shard import apply_shard


def compute_dtypes(config: Config, device_type: str) -> tuple[torch.dtype, torch.dtype]:
    """(compute, reduce) dtypes. `auto` computes in bfloat16 on CUDA and in float32 elsewhere."""
    name = config.training.compute_dtype
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, name), getattr(torch, config.training.reduce_dtype)


def parallelize(model: Any, config: Config, mesh: DeviceMesh) -> None:
    """Recompute -> compile -> shard. The model is a Llama on the meta device, known by its modules' names."""
    assert isinstance(model.layers, nn.ModuleDict)
    blocks = list(model.layers.values())
    for index, block in enumerate(blocks):
        apply_recompute(block, config.recompute, index)
        apply_compile(block, config.compile)
    units = [[block] for block in blocks]
    if model.output is not None:  # a tied embedding is used at both ends: it stays with the model
        units = [[model.tok_embeddings], *units, [model.norm, model.output]]
    compute, reduce = compute_dtypes(config, mesh.device_type)
    apply_shard(model, units, config.parallel, mesh, compute, reduce)
