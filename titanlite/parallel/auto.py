"""What `auto` means: resolved once, at the start of a run, into the config.

What it is: `training.compute_dtype` and `compile.enabled` may be `auto`. Here both get the value that suits this device
and this model; everything after reads the value. A run's config.toml and its checkpoints hold it too.
Why it is here: a setting that several functions resolve, each when it is needed, may mean two things in one run, and a
collective in the middle of a function that only reads a setting hangs the run if one rank skips it.
What it costs: small values exchanged between all ranks, and a call of the C++ compiler on each if blocks are compiled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch

from titanlite.config.schema import WIDE, Config, ConfigError
from titanlite.distributed.agreement import first_message, require_agreement
from titanlite.parallel.rules import reason_not_compiled

logger = logging.getLogger("titanlite")


def resolve_auto(config: Config, dim: int, degrees: Mapping[str, int], device_type: str) -> Config:
    """The config for a model of width `dim` with every `auto` replaced; all ranks call it together, with one result.

    Raises ConfigError on all ranks where they would compute in different dtypes, or where a compiler is required and
    some rank has none.
    """
    compute = compute_dtype(config, dim, device_type)
    require_agreement(compute_dtype=compute)
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

    `auto` is bfloat16 on CUDA, and on a CPU that multiplies it: matrix products then take half the time. In a narrow
    model the casts cost more than that saves (benchmarks/levers.py).
    """
    if config.training.compute_dtype != "auto":
        return config.training.compute_dtype
    return "bfloat16" if device_type == "cuda" or (dim >= WIDE and cpu_has_bfloat16()) else "float32"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has x86 instructions for bfloat16 products. Other CPUs were not measured."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _resolve_compile(config: Config, dim: int, degrees: Mapping[str, int], device_type: str) -> str:
    """Why the blocks are not compiled; empty if they are. The same on all ranks."""
    reason = reason_not_compiled(config, degrees, dim, device_type)
    if config.compile.backend != "inductor" or (reason and not config.compile.loss):
        return reason  # no compiler is needed
    from titanlite.parallel.compile import missing_for_inductor

    missing = first_message(missing_for_inductor(device_type))
    required = {  # setting -> the setting that does without a compiler
        "compile.enabled = true": ("compile.enabled = false", config.compile.enabled == "true"),
        "recompute.mode = memory_budget": ("another recompute.mode", config.recompute.mode == "memory_budget"),
        "compile.loss = true": ("compile.loss = false", config.compile.loss),
    }
    for setting, (otherwise, is_set) in required.items():
        if missing and is_set:
            raise ConfigError(f"{setting} needs a compiler: {missing}; expected one, or {otherwise}")
    return reason or missing
