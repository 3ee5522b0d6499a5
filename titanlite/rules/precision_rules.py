"""Rules of float16, float8 and offloading: what they do not support.

Imported if one of them is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from titanlite.config.mistakes import suggestion
from titanlite.config.schema import Config
from titanlite.model.flavors import BLOCK_LINEAR, LlamaConfig
from titanlite.runtime.errors import ConfigError


def precision_problems(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> Iterable[str]:
    """The rules of each that is set."""
    if config.float8.enabled:
        yield from _float8(config, llama)
    if config.training.compute_dtype == "float16":
        yield from float16_problems(config)
    if config.recompute.offload and config.recompute.mode != "full":
        yield (
            f"recompute.offload = true with recompute.mode = {config.recompute.mode}: it copies the inputs of blocks, "
            "which are all that is kept with recompute.mode = full; expected that"
        )
    if config.parallel.optimizer_offload and config.parallel.cpu_offload:
        yield (
            "parallel.optimizer_offload = true and parallel.cpu_offload = true: the latter keeps the moments in CPU "
            "memory too, and computes the update there; expected only one of them"
        )
    if config.parallel.optimizer_offload and config.optimizer.name == "muon":
        yield (
            "parallel.optimizer_offload = true with optimizer.name = muon: offloading updates some parameters at a "
            "time, and Muon's matrices are divided over ranks; expected optimizer.name = adamw, or "
            "parallel.cpu_offload = true"
        )


def _float8(config: Config, llama: LlamaConfig) -> Iterable[str]:
    """Each name in `float8.skip` must match a layer, and some layers must be left."""
    if (
        config.float8.scaling == "rowwise"
        and not config.float8.emulate
        and config.training.compute_dtype == "float32"
    ):
        yield (
            "float8.scaling = rowwise with training.compute_dtype = float32: the hardware returns bfloat16; expected "
            "training.compute_dtype = bfloat16, or float8.scaling = tensorwise"
        )
    names = [f"layers.{i}.{name}" for i in range(llama.num_layers) for name in BLOCK_LINEAR]
    for part in config.float8.skipped:
        if not any(part in name for name in names):
            near = suggestion(
                part, [*BLOCK_LINEAR, *(f"layers.{i}." for i in range(llama.num_layers))]
            )
            allowed = ", ".join(BLOCK_LINEAR)
            yield f"float8.skip: no linear layer has {part} in its name; expected parts of {allowed}{near}"
    if all(any(part in name for part in config.float8.skipped) for name in names):
        yield f"float8.skip = {config.float8.skip!r} skips all linear layers; expected some, or float8.enabled = false"


def require_float16(config: Config) -> None:
    """Raises ConfigError if float16, which `auto` has chosen, does not fit the other settings."""
    problems = list(float16_problems(config))
    if problems:
        raise ConfigError(
            [f"compute_dtype = auto is float16 on this GPU: {problem}" for problem in problems]
        )


def float16_problems(config: Config) -> Iterable[str]:
    """Everything but the computation is fp32, updates can be withheld, and the scale is a power of
    two.
    """
    training = config.training
    optimizer = config.optimizer
    for key in ("param_dtype", "reduce_dtype"):
        found = getattr(training, key)
        if found != "float32":
            yield (
                f"training.{key} = {found} with training.compute_dtype = float16: it would lose the bits that float16 "
                f"keeps; expected training.{key} = float32, or training.compute_dtype = bfloat16"
            )
    if config.float8.enabled:
        yield (
            "float8.enabled = true with training.compute_dtype = float16: devices with float8 have bfloat16; "
            "expected training.compute_dtype = bfloat16, or float8.enabled = false"
        )
    if optimizer.implementation not in ("auto", "fused") and optimizer.state_dtype == "float32":
        yield (
            f"optimizer.implementation = {optimizer.implementation} with training.compute_dtype = float16: it cannot "
            "withhold an update on the device; expected auto or fused"
        )
    if math.frexp(scale := training.loss_scale)[0] != 0.5:
        near = 2 ** round(math.log2(scale))
        yield f"training.loss_scale = {scale:g} is not a power of two, so scaling would round; nearest: {near}"
