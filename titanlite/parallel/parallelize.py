"""The order in which techniques are applied to an untouched model.

Each is a function that changes modules in place. The order matters: recomputation wraps a block's forward,
the compiler then sees both as one graph, and sharding's hooks stay outside of it.
"""

from __future__ import annotations

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


def parallelize(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Recompute -> compile -> shard, block by block. The model is on the meta device; its blocks are `model.layers`."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    blocks = list(layers.values())
    for index, block in enumerate(blocks):
        apply_recompute(block, config.recompute, index)
        apply_compile(block, config.compile)
    compute, reduce = compute_dtypes(config, mesh.device_type)
    apply_shard(model, blocks, config.parallel, mesh, compute, reduce)
