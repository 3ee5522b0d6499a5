"""Takes a plain model, returns a parallel one: which techniques, and in which order.

What it is: each technique is a function `apply_*` that changes modules in place. A run imports the techniques it uses.
Why this order: three of its steps are necessary. With torch 2.13 the other orders fail,

    pipeline before fsdp         a stage is a copy of the model: "FSDP does not support deepcopy"
    tp before fsdp               "Cannot distribute a DTensor with device mesh (dp_shard_cp) to a different device mesh"
    compile before `full` ac     with tp, when the recomputed block is inside of the compiled graph:
                                 "expected all tensors_saved_with_vc_check to be Tensors"

and tests/parallel/test_parallelize.py tries them. Otherwise tp and cp, which change the inside of a block, and ac and
compile, which wrap its forward, may be exchanged: the gradients stay equal. `selective` and `memory_budget` come before
compile, so that the compiler sees what is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch

from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.watchdog import mark_phase
from titanlite.parallel.fsdp import apply_fsdp, assign_shard


def build_model_parts(model: Any, config: Config, mesh: Mesh, device: torch.device) -> list[Any]:
    """The parts of a model that this rank holds, parallelised and with initial weights: one, or its pipeline stages.

    `model`: a Llama on the meta device, so no rank ever holds more than its own part. `config` has no `auto`.
    """
    mark_phase("building the model")
    model_parts = split_and_parallelize(model, config, mesh)
    for part in model_parts:
        part.to_empty(device="cpu" if config.parallel.cpu_offload else device)
        part.init_weights(config.run.seed, assign_shard, device)
    return model_parts


def split_and_parallelize(model: Any, config: Config, mesh: Mesh) -> list[Any]:
    """The parts of a model on the meta device, parallelised, without memory.

    Parameters become `training.param_dtype`; the RoPE table stays fp32, since it is made anew.
    """
    model_parts = [model.to(getattr(torch, config.training.param_dtype))]
    if mesh["pp"].size() > 1:
        from titanlite.parallel.pipeline_parallel import split_into_stages

        model_parts = split_into_stages(model, config.parallel, mesh["pp"])
    for part in model_parts:
        parallelize(part, config, mesh)
    return model_parts


def parallelize(model: Any, config: Config, mesh: Mesh) -> None:
    """Applies every technique that the config asks for. The model is a Llama, known by its modules' names."""
    if config.float8.enabled:
        from titanlite.parallel.float8 import apply_float8

        apply_float8(model, config.float8, mesh.device_type)
    if config.loss.num_chunks > 1:
        from titanlite.parallel.chunked_loss import defer_output

        defer_output(model)
    if mesh["tp"].size() > 1:
        from titanlite.parallel.tensor_parallel import apply_tp

        apply_tp(model, mesh["tp"], config.parallel.async_tp)
    if mesh["cp"].size() > 1:
        from titanlite.parallel.context_parallel import apply_cp

        apply_cp(model, mesh["cp"], config.parallel.cp_method)
    if config.recompute.mode == "selective":
        from titanlite.parallel.activation_checkpoint import apply_ac

        apply_ac(model, config.recompute)
    assert config.compile.enabled != "auto", "resolve_auto comes first"
    if config.compile.enabled == "true":
        from titanlite.parallel.compile import apply_compile

        apply_compile(model, config.compile.backend, config.recompute)
    if config.recompute.mode == "full":  # around the compiled blocks, since nothing of a block is kept
        from titanlite.parallel.activation_checkpoint import apply_ac

        apply_ac(model, config.recompute)
    training = config.training
    compute, reduce = getattr(torch, training.compute_dtype), getattr(torch, training.reduce_dtype)
    apply_fsdp(model, config.parallel, mesh, compute, reduce)
