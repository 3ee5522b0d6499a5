"""Conditions of `[stability]` on the rest of the config. Imported only if a key of it is set."""

from __future__ import annotations

from collections.abc import Iterable

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig


def stability_problems(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> Iterable[str]:
    """The optimizer must be able to withhold an update on the device; to roll back there must be
    checkpoints.
    """
    implementation = config.optimizer.implementation
    checkpoint = config.checkpoint
    # Has one implementation
    low = "bfloat16" in (config.optimizer.state_dtype, config.training.param_dtype)
    if implementation in ("foreach", "for-loop") and not low:
        yield (
            f"optimizer.implementation = {implementation} cannot withhold the update of a bad step; with [stability] "
            "expected auto or fused"
        )
    if config.stability.action == "rollback" and not (checkpoint.freq or checkpoint.freq_minutes):
        yield (
            "stability.action = rollback, and checkpoint.freq = 0: expected checkpoint.freq or checkpoint.freq_minutes "
            "above 0, since a run rolls back to a checkpoint"
        )
