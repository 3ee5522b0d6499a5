"""Turns a plain model into a parallel one: the techniques that are applied, and their order.

What it is: each technique is a function `apply_*` that changes modules in place. A run imports only
the techniques that it uses.
Why this order: three of its steps are necessary. Left, the required order; right, the error of the
reverse one in torch 2.13:

    pipeline before fsdp       "FSDP does not support deepcopy": each stage is made from a copy of the model
    tp before fsdp             "Cannot distribute a DTensor with device mesh (dp_shard_cp) to a different device mesh":
                               FSDP has made the weights DTensors on its mesh, and tp cannot distribute them again
    compile before `full` ac   "expected all tensors_saved_with_vc_check to be Tensors": only with tp, if the recomputed
                               block is inside the compiled graph

tests/parallel/test_parallelize.py tries these orders. Apart from them, tp and cp, which change the
inside of a block, can come before or after ac and compile, which wrap its forward: the gradients
are equal. `selective` and `memory_budget` come before compile, so that the compiler sees what is
recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.watchdog import mark_phase
from titanlite.rules.degrees import needs_fsdp


def build_model_parts(model: Any, config: Config, mesh: Mesh, device: torch.device) -> list[Any]:
    """This rank's parts of a model, parallelised and with initial weights: one part, or its
    pipeline stages.

    `model`: a Llama on the meta device; a rank holds its own part, and one full parameter while
    that is drawn. `config` comes from `resolve_auto`.
    """
    mark_phase("building the model")
    model_parts = split_and_parallelize(model, config, mesh)
    for part in model_parts:
        part.to_empty(device="cpu" if config.parallel.cpu_offload else device)
        part.init_weights(config.run.seed, assign_shard, device)
    return model_parts


def split_and_parallelize(model: Any, config: Config, mesh: Mesh) -> list[Any]:
    """The parts of a model on the meta device, parallelised, without memory.

    Parameters get the dtype `training.param_dtype`. The RoPE table is computed later, in fp32.
    """
    model_parts = [model.to(getattr(torch, config.training.param_dtype))]
    if mesh["pp"].size() > 1:
        from titanlite.parallel.pipeline_parallel import split_into_stages

        model_parts = split_into_stages(model, config.parallel, mesh["pp"])
    for part in model_parts:
        parallelize(part, config, mesh)
    return model_parts


def parallelize(model: Any, config: Config, mesh: Mesh) -> None:
    """Applies every technique that the config enables.

    `model` is a Llama; modules are found by name.
    """
    if config.float8.enabled:
        from titanlite.parallel.float8 import apply_float8

        apply_float8(model, config.float8, mesh.device_type, mesh["tp"].size())
    if config.loss.num_chunks > 1:
        from titanlite.parallel.deferred_output import defer_output

        defer_output(model)
    if mesh["tp"].size() > 1:
        from titanlite.parallel.tensor_parallel import apply_tp

        apply_tp(model, mesh["tp"], config.parallel.async_tp)
    if config.data.document_mask and mesh.device_type == "cuda":
        from titanlite.model.block_mask import apply_block_mask
        from titanlite.parallel.compile import missing_for_inductor

        apply_block_mask(model, missing_for_inductor(mesh.device_type))
    if mesh["cp"].size() > 1:
        from titanlite.parallel.context_parallel import apply_cp

        apply_cp(model, mesh["cp"], config.parallel.cp_method)
    if config.recompute.mode == "selective":
        from titanlite.parallel.activation_checkpoint import apply_ac

        apply_ac(model, config.recompute)
    assert config.compile.enabled != "auto", "resolve_auto comes first"
    if config.compile.enabled == "true":
        from titanlite.parallel.compile import apply_compile

        apply_compile(model, config.compile.backend, config.recompute, config.parallel.async_tp)
    if config.recompute.mode == "full":  # outside the compiled graph: a block keeps only its input
        from titanlite.parallel.activation_checkpoint import apply_ac

        apply_ac(model, config.recompute)
    training = config.training
    compute = getattr(torch, training.compute_dtype)
    reduce = getattr(torch, training.reduce_dtype)
    if needs_fsdp(config.parallel, dist.get_world_size()):
        from titanlite.parallel.fsdp import apply_fsdp

        apply_fsdp(model, config.parallel, mesh, compute, reduce)
    elif training.compute_dtype != training.param_dtype:
        from titanlite.parallel.mixed_precision import apply_mixed_precision

        apply_mixed_precision(model, compute)


def assign_shard(parameter: Tensor, full: Tensor) -> None:
    """Copies this rank's part of a full tensor into a parameter.

    Every rank has the same `full`: no communication.
    """
    if isinstance(parameter, DTensor):
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
