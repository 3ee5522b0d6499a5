"""Resolves `auto` for this device and model, once, at the start of a run.

What it is: `training.compute_dtype` and `compile.enabled` may be `auto`. `resolve_dtype` replaces
the first in the config, so a run's config.toml and its checkpoints record the dtype.
`decide_compile` returns a decision that is not recorded: a resumed run may have another layout or
device.
Why it is here: if several functions resolved a setting when they need it, they could get different
values in one run. Ranks must also agree on the value by a collective, and a rank that skips such a
call would make the run hang.
What it costs: small values exchanged between all ranks and, if blocks are to be compiled, one call
of the C++ compiler on each rank.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Mapping

import torch

from titanlite.config.schema import WIDE, Config
from titanlite.distributed.agreement import require_agreement
from titanlite.distributed.torch_private import mkldnn_has_bfloat16
from titanlite.model.flavors import LlamaConfig
from titanlite.parallel.compile import missing_compiler
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.excludes import require_float16

logger = logging.getLogger("titanlite")


def resolve_dtype(config: Config, llama: LlamaConfig, device: torch.device) -> Config:
    """Replaces `training.compute_dtype = auto` by a dtype; all ranks call it together.

    Raises ConfigError on all ranks if they would compute in different dtypes, or if float16 is
    chosen and does not fit the other settings.
    """
    compute = compute_dtype(config, llama.dim, device.type)
    require_agreement(compute_dtype=compute)
    if config.training.compute_dtype == "auto" and compute == "float16":
        require_float16(config)  # `check_layout` saw only `auto`
    training = dataclasses.replace(config.training, compute_dtype=compute)
    return dataclasses.replace(config, training=training)


def compute_dtype(config: Config, dim: int, device_type: str) -> str:
    """Returns the dtype of forward and backward.

    `auto` is bfloat16 on CUDA, and on a CPU with bfloat16 instructions, where matrix products then
    take half the time; but not for a narrow model on a CPU, whose casts cost more than that saves
    (docs/cpu.md). GPUs below compute capability 8.0 only emulate bfloat16; there it is
    float16, unless another dtype of the config is bfloat16.
    """
    training = config.training
    if training.compute_dtype != "auto":
        return training.compute_dtype
    if device_type == "cuda":
        emulates = torch.cuda.get_device_capability() < (8, 0)
        if emulates and training.param_dtype == training.reduce_dtype == "float32":
            return "float16"
        return "bfloat16"
    if device_type == "cpu" and dim >= WIDE and cpu_has_bfloat16():
        return "bfloat16"
    return "float32"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions that torch uses.

    Speed was measured on x86 only.
    """
    if platform.machine() in ("aarch64", "arm64"):  # there it depends on what torch was built with
        return mkldnn_has_bfloat16()
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def decide_compile(
    config: Config, llama: LlamaConfig, degrees: Mapping[str, int], device: torch.device
) -> bool:
    """Whether blocks are compiled; all ranks call it together and get the same answer.

    Logs why `compile.enabled = auto` does not compile. Raises ConfigError on all ranks if a
    setting requires a compiler and some rank has none.
    """
    reason = reason_not_compiled(config, degrees, llama.dim, device.type)
    compiles = not reason or config.compile.loss == "true"
    if compiles and config.compile.backend == "inductor":
        # Also called if only the loss is compiled: it raises if there is no compiler
        missing = missing_compiler(config, device.type)
        reason = reason or missing
    if reason and config.compile.enabled == "auto":
        logger.info("compile.enabled = auto: blocks are not compiled: %s", reason)
    return not reason
