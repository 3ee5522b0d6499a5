"""Decides whether blocks and loss are compiled if that is `auto`. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from titanlite.config.schema import SPLIT_BACKWARD, WIDE, CompileConfig, Config


def reason_not_compiled(
    config: Config, degrees: Mapping[str, int], dim: int, device_type: str
) -> str:
    """Gives the reason why the blocks are not compiled; empty if they are.

    `dim` is the model's width, `device_type` cuda or cpu.
    """
    if config.compile.enabled == "true":
        return ""
    if config.compile.enabled == "false":
        return "compile.enabled = false"
    if config.recompute.mode == "memory_budget":
        return ""  # the compiler decides what is recomputed
    if device_type == "cpu" and dim < WIDE:
        return f"the model is less than {WIDE} wide, on a CPU"
    if device_type != "cuda" and sys.platform != "linux":
        return "compiling has been tried on Linux only"
    schedule = config.parallel.pp_schedule
    if degrees["pp"] > 1 and schedule in SPLIT_BACKWARD:
        return f"{schedule} computes a block's two gradients in separate calls"
    return ""


def compiles_loss(config: CompileConfig, blocks: bool, device_type: str) -> bool:
    """Whether the loss is compiled; `blocks`: whether the blocks are.

    On a CPU it is not worth the time of the compiler.
    """
    if config.loss == "auto":
        return blocks and device_type == "cuda"
    return config.loss == "true"
