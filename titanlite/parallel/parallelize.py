"""Turns a plain model into a parallel one: the techniques that are applied, and their order.

What it is: each technique is a function `apply_*` that changes modules in place.
Why this order: float8 and adapters replace layers, so they come before tp, whose hooks are on the
layers. Three more pairs must be in this order. The right column is torch 2.13's error for the
reverse order:

    pipeline before fsdp       "FSDP does not support deepcopy": each stage is made from a copy of
                               the model
    tp before fsdp             "Cannot distribute a DTensor with device mesh (dp_shard_cp) to a
                               different device mesh": FSDP has made the weights DTensors on its
                               mesh, and tp cannot distribute them again
    compile before `full` ac   "expected all tensors_saved_with_vc_check to be Tensors": only with
                               tp, if the recomputed block is inside the compiled graph

tests/parallel/test_parallelize.py tries these orders. Apart from them, tp and cp, which change the
inside of a block, can come before or after ac and compile, which wrap its forward: the gradients
are equal. `selective` and `memory_budget` come before compile, so that the compiler sees what is
recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.model.block_mask import SMALLEST_HEAD, block_mask
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile, compiles_experts, missing_for_inductor
from titanlite.parallel.context_parallel import apply_cp
from titanlite.parallel.deferred_output import defer_output
from titanlite.parallel.expert_parallel import apply_ep
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.lora import apply_dropout, apply_lora, is_frozen
from titanlite.parallel.mixed_precision import apply_mixed_precision
from titanlite.parallel.pipeline_parallel import split_into_stages
from titanlite.parallel.required_memory import require_memory
from titanlite.parallel.tensor_parallel import apply_tp
from titanlite.rules.degrees import needs_fsdp
from titanlite.rules.loss_chunks import loss_chunks
from titanlite.runtime.phases import Phase, mark_phase

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

logger = logging.getLogger("titanlite")


def build_model_parts(
    model: Llama, config: Config, mesh: Mesh, device: torch.device, compiled: bool
) -> list[Llama]:
    """Builds this rank's parts of a model, parallelised and with initial weights.

    Returns one part, or the rank's pipeline stages. `model`: a Llama on the meta device. A rank
    allocates its own parts, and one full parameter at a time while that is drawn. `compiled` comes
    from `decide_compile`. Raises ConfigError if the memory of a GPU or a host is too small.
    """
    mark_phase(Phase.BUILD_MODEL)
    model_parts = split_and_parallelize(model, config, mesh, compiled)
    require_memory(model_parts, config, device)
    for part in model_parts:
        part.to_empty(device="cpu" if config.parallel.cpu_offload else device)
        part.init_weights(config.run.seed, assign_shard, device)
    return model_parts


def split_and_parallelize(model: Llama, config: Config, mesh: Mesh, compiled: bool) -> list[Llama]:
    """Returns this rank's parts of a model, parallelised, still on the meta device.

    Parameters get the dtype `training.param_dtype`. The RoPE table is computed later, in fp32.
    """
    model_parts = [model.to(getattr(torch, config.training.param_dtype))]
    if mesh["pp"].size() > 1:
        model_parts = split_into_stages(model, config.parallel, mesh["pp"])
    for part in model_parts:
        parallelize(part, config, mesh, compiled)
    return model_parts


def parallelize(model: Llama, config: Config, mesh: Mesh, compiled: bool) -> None:
    """Applies every technique that the config enables.

    `model` is a Llama or a pipeline stage of one; modules are found by name. `config` comes from
    `resolve_dtype`.
    """
    parallel = config.parallel
    training = config.training
    recompute = config.recompute
    compute = getattr(torch, training.compute_dtype)
    reduce = getattr(torch, training.reduce_dtype)

    # Inside the blocks and at the ends: replaces or cuts single layers
    if config.float8.enabled:
        apply_float8(model, config.float8, mesh.device_type, mesh["tp"].size())
    if config.lora.rank > 0:
        apply_lora(model, config.lora)
    if loss_chunks(config, model.config.vocab_size, mesh.degrees) > 1:
        defer_output(model)
    if mesh["tp"].size() > 1:
        apply_tp(model, mesh["tp"], parallel.async_tp)
    if model.config.num_experts:
        apply_ep(model, mesh)
    # After tp, which makes new parameters
    freeze(model, training.frozen_patterns, adapted=config.lora.rank > 0)
    masked = config.data.document_mask or any(model.windows)
    if masked and mesh.device_type == "cuda":
        apply_block_mask(model, missing_for_inductor(mesh.device_type))
    if mesh["cp"].size() > 1:
        apply_cp(model, mesh["cp"], parallel.cp_method)

    # Around a block's forward
    seen_by_compiler = compiled and recompute.mode == "selective"
    if seen_by_compiler:  # inside the compiled graph
        apply_ac(model, recompute)
    if compiled:
        # With ep the router decides about sizes of messages, which a graph cannot have
        experts = mesh.ep == 1 and compiles_experts(model.config, compute)
        apply_compile(model, config.compile.backend, recompute, parallel.async_tp, experts)
    if config.lora.drops:
        apply_dropout(model)
    if not seen_by_compiler:  # `full` is outside the compiled graph: a block keeps only its input
        apply_ac(model, recompute)

    # Around everything: where parameters are stored, and the dtype in which they compute
    if needs_fsdp(parallel, dist.get_world_size()):
        apply_fsdp(model, parallel, mesh, compute, reduce)
    elif training.compute_dtype != training.param_dtype:
        apply_mixed_precision(model, compute)


def apply_block_mask(model: Llama, no_compiler: str) -> None:
    """Lets the model make block masks. Where FlexAttention cannot run, masks remain tensors.

    `no_compiler`: why nothing can be compiled on this device; empty if it can.
    """
    head_dim = model.config.head_dim
    reason = no_compiler
    if not reason and head_dim < SMALLEST_HEAD:
        reason = f"heads of {head_dim} numbers"
    if reason:
        logger.info("attention reads a mask of B x S x S bytes: %s", reason)
    else:
        model.document_mask = block_mask


def freeze(model: Llama, patterns: Sequence[str], adapted: bool) -> None:
    """Excludes parameters from training: those whose names fit a pattern and, in a model with
    adapters, all others than these.

    They get no gradients, no moments and no updates.
    """
    for name, parameter in model.named_parameters():
        if (adapted and is_frozen(name)) or any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def assign_shard(parameter: Tensor, full: Tensor) -> None:
    """Copies this rank's part of a full tensor into a parameter.

    Every rank has the same `full`: no communication.
    """
    if isinstance(parameter, DTensor):
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
