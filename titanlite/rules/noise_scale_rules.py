"""Conditions of `metrics.noise_scale_freq` on the rest of the config.

Imported only if it is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig


def noise_scale_problems(
    config: Config, llama: LlamaConfig, degrees: dict[str, int]
) -> Iterable[str]:
    """A step needs two local batches or more, and the gradient of the first must be reduced before
    the second.
    """
    training = config.training
    parallel = config.parallel
    key = "metrics.noise_scale_freq"
    readers = degrees["dp_replicate"] * degrees["dp_shard"]
    if training.global_batch_size < 2 * (portion := training.local_batch_size * readers):
        yield (
            f"{key} = {config.metrics.noise_scale_freq} compares the first local batch of a step with all of them, and "
            f"training.global_batch_size = {training.global_batch_size} is one of training.local_batch_size = "
            f"{training.local_batch_size} in each of {readers} data-parallel processes; expected a smaller local "
            f"batch, or a global one of at least {2 * portion}"
        )
    fsdp = (
        math.prod(degrees.values()) > 1
        or parallel.cpu_offload
        or parallel.reshard_after_forward != "default"
    )
    if fsdp and not parallel.reduce_every_microbatch:
        yield (
            f"{key} = {config.metrics.noise_scale_freq} needs the gradient of the first local batch; expected "
            "parallel.reduce_every_microbatch = true"
        )
