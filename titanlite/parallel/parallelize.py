"""The order in which techniques are applied to an untouched model.

Each is a function that changes modules in place. The order matters: tensor parallel replaces weights and hooks the
modules they are in, recomputation wraps the block's forward with all that in it, the compiler then sees both as one
graph, and sharding's hooks stay outside of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from titanlite.config.schema import WIDE, Config, ConfigError
from titanlite.distributed.agreement import first_message
from titanlite.distributed.mesh import Mesh
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.chunked_loss import defer_output
from titanlite.parallel.compile import apply_compile, missing_for_inductor
from titanlite.parallel.context_parallel import apply_cp
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.pipeline_parallel import split_into_stages
from titanlite.parallel.rules import reason_not_compiled
from titanlite.parallel.tensor_parallel import apply_tp


def compute_dtypes(config: Config, dim: int, device_type: str) -> tuple[torch.dtype, torch.dtype]:
    """(compute, reduce) dtypes for a model of this width.

    `auto` computes in bfloat16 on CUDA, and on a CPU with instructions for it: its products take half the time, its
    casts more than that saves where matrices are small.
    """
    name = config.training.compute_dtype
    if name == "auto":
        gains = device_type == "cuda" or (dim >= WIDE and cpu_has_bfloat16())
        name = "bfloat16" if gains else "float32"
    return getattr(torch, name), getattr(torch, config.training.reduce_dtype)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has x86's instructions for products of bfloat16; others were not measured."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def resolve_auto(config: Config, dim: int, device_type: str) -> Config:
    """The config with the dtype that `auto` means here, which is what the run is and its checkpoints tell."""
    compute, _ = compute_dtypes(config, dim, device_type)
    name = str(compute).removeprefix("torch.")
    return dataclasses.replace(config, training=dataclasses.replace(config.training, compute_dtype=name))


def reason_blocks_not_compiled(config: Config, dim: int, mesh: Mesh) -> str:
    """Why blocks of this width are not compiled; empty if they are. The same on all processes, which call it together.

    Raises ConfigError if they must be and cannot.
    """
    sections = config.compile, config.recompute, config.parallel
    why = reason_not_compiled(*sections, mesh.degrees, dim, mesh.device_type)
    if why or config.compile.backend != "inductor":
        return why
    if config.compile.enabled == "true":
        require_inductor("compile.enabled = true", "compile.enabled = false", mesh.device_type)
    if config.recompute.mode == "memory_budget":
        require_inductor("recompute.mode = memory_budget", "another recompute.mode", mesh.device_type)
    return first_message(missing_for_inductor(mesh.device_type))


def require_inductor(what: str, otherwise: str, device_type: str) -> None:
    """Raises ConfigError on all processes, which call it together, where some process cannot compile."""
    if lacks := first_message(missing_for_inductor(device_type)):
        raise ConfigError(f"{what} needs a compiler: {lacks}; expected one, or {otherwise}")


def split_and_parallelize(model: Any, config: Config, mesh: Mesh) -> list[Any]:
    """The parts of an untouched model on the meta device that this process holds, each parallelised.

    Parameters become `training.param_dtype`; the RoPE table, which is made anew, does not.
    """
    parts = split_into_stages(model.to(getattr(torch, config.training.param_dtype)), config.parallel, mesh["pp"])
    for part in parts:
        parallelize(part, config, mesh)
    return parts


def parallelize(model: Any, config: Config, mesh: Mesh) -> None:
    """float8, output, tensor, context, recompute, compile, shard. The model is a Llama, known by its modules' names."""
    apply_float8(model, config.float8, mesh.device_type)
    defer_output(model, config.loss.num_chunks)
    apply_tp(model, mesh["tp"], config.parallel.async_tp)
    apply_cp(model, mesh["cp"], config.parallel.cp_method)
    outside = config.recompute.mode == "full"  # of the compiled block, of which nothing is kept
    compiled = not reason_blocks_not_compiled(config, model.config.dim, mesh)
    for name, block in model.layers.items():
        if not outside:
            apply_ac(block, config.recompute, int(name))
        if compiled:
            apply_compile(block, config.compile.backend)
        if outside:
            apply_ac(block, config.recompute, int(name))
    apply_fsdp(model, config.parallel, mesh, *compute_dtypes(config, model.config.dim, mesh.device_type))
