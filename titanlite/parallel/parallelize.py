"""The order in which techniques are applied to an untouched model.

Each is a function that changes modules in place. The order matters: tensor parallel replaces weights and hooks the
modules they are in, recomputation wraps the block's forward with all that in it, the compiler then sees both as one
graph, and sharding's hooks stay outside of it.
"""

from __future__ import annotations

from typing import Any

import torch

from titanlite.config import Config
from titanlite.parallel.chunked import defer_output
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.context import apply_context
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import cut
from titanlite.parallel.recompute import apply_recompute
from titanlite.parallel.shard import apply_shard
from titanlite.parallel.tensor import apply_tensor


def compute_dtypes(config: Config, device_type: str) -> tuple[torch.dtype, torch.dtype]:
    """(compute, reduce) dtypes. `auto` computes in bfloat16 on CUDA and in float32 elsewhere."""
    name = config.training.compute_dtype
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" else "float32"
    return getattr(torch, name), getattr(torch, config.training.reduce_dtype)


def split(model: Any, config: Config, mesh: Mesh) -> list[Any]:
    """The parts of an untouched model on the meta device that this process holds, each parallelised.

    Parameters become `training.param_dtype`; the RoPE table, which is made anew, does not.
    """
    parts = cut(model.to(getattr(torch, config.training.param_dtype)), config.parallel, mesh["pp"])
    for part in parts:
        parallelize(part, config, mesh)
    return parts


def parallelize(model: Any, config: Config, mesh: Mesh) -> None:
    """float8, output, tensor, context, recompute, compile, shard. The model is a Llama, known by its modules' names."""
    apply_float8(model, config.float8, mesh.device_type)
    defer_output(model, config.loss.num_chunks)
    apply_tensor(model, mesh["tp"], config.parallel.async_tp)
    apply_context(model, mesh["cp"], config.parallel.cp_method)
    for name, block in model.layers.items():
        if config.recompute.mode == "full":  # outside of the compiled block, of which nothing is kept
            apply_compile(block, config.compile)
            apply_recompute(block, config.recompute, int(name))
        else:
            apply_recompute(block, config.recompute, int(name))
            apply_compile(block, config.compile)
    apply_shard(model, config.parallel, mesh, *compute_dtypes(config, mesh.device_type))
