"""Replaces `auto` in the config by values for this device and model, once, at the start of a run.

What it is: `training.compute_dtype` and `compile.enabled` may be `auto`. Here both are resolved;
all later code reads the resolved values. A run's config.toml and its checkpoints record the
resolved dtype; they keep `compile.enabled` as it was set, since a resumed run may have another
layout or device. Why it is here: if several functions resolved a setting when they need it, they
could get different values in one run. Ranks must also agree on the value by a collective, and a
rank that skips such a call would make the run hang. What it costs: small values exchanged between
all ranks and, if blocks are to be compiled, one call of the C++ compiler on each rank.
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
from titanlite.rules.compiled import reason_not_compiled
from titanlite.rules.excludes import require_float16

logger = logging.getLogger("titanlite")


def resolve_auto(config: Config, dim: int, degrees: Mapping[str, int], device_type: str) -> Config:
    """The config for a model of width `dim` with both replaced; all ranks call it together and get
    the same.

    Raises ConfigError on all ranks if they would compute in different dtypes, if float16 is chosen
    and does not fit the other settings, or if a compiler is required and some rank has none.
    """
    compute = compute_dtype(config, dim, device_type)
    require_agreement(compute_dtype=compute)
    # Otherwise `check_layout` has applied its rules
    if config.training.compute_dtype != compute == "float16":
        require_float16(config)
    reason = _resolve_compile(config, dim, degrees, device_type)
    if config.compile.enabled == "auto" and reason:
        logger.info("compile.enabled = auto: blocks are not compiled: %s", reason)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, compute_dtype=compute),
        compile=dataclasses.replace(config.compile, enabled="false" if reason else "true"),
    )


def compute_dtype(config: Config, dim: int, device_type: str) -> str:
    """The dtype of forward and backward.

    `auto` is bfloat16 on CUDA, and on a CPU with bfloat16 instructions, where matrix products then
    take half the time; but not for a narrow model on a CPU, whose casts cost more than that saves
    (benchmarks/levers.py). GPUs below compute capability 8.0 only emulate bfloat16; there it is
    float16, unless another dtype of the config is bfloat16.
    """
    if config.training.compute_dtype != "auto":
        return config.training.compute_dtype
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return (
            "float16"
            if config.training.param_dtype == config.training.reduce_dtype == "float32"
            else "bfloat16"
        )
    faster = device_type == "cuda" or (device_type == "cpu" and dim >= WIDE and cpu_has_bfloat16())
    return "bfloat16" if faster else "float32"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products that torch uses.

    Speed was measured on x86 only.
    """
    if platform.machine() in ("aarch64", "arm64"):  # there it depends on what torch was built with
        return mkldnn_has_bfloat16()
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _resolve_compile(config: Config, dim: int, degrees: Mapping[str, int], device_type: str) -> str:
    """Why the blocks are not compiled; empty if they are. The same on all ranks."""
    reason = reason_not_compiled(config, degrees, dim, device_type)
    if config.compile.backend != "inductor" or (reason and not config.compile.loss):
        return reason  # no compiler is needed
    from titanlite.parallel.compile import missing_compiler

    # Raises an error also if only the loss is compiled
    missing = missing_compiler(config, device_type)
    return reason or missing
