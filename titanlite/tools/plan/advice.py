"""Whether a step fits into the memory of a GPU, and which keys would help if it does not.

What it is: compares what the allocator reserves on a rank, as a range, plus the CUDA context, with
the memory of the GPU. Within the range the verdict is "may fit". Keys that help are found by trial:
one change at a time is estimated, and each one that reduces the total is named with the new total.
Why it is here: a number of bytes alone does not say what to change.
What it costs: about 20 ms for each change. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import Memory
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.estimate_memory import range_fits, reserved_bytes, sharded_gradients

GIB = 2**30
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "whole_gradients": "gradients before their reduction",
    "gathered": "gathered weights",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "communication buffers",
}
VERDICTS = {True: "fits", None: "may fit", False: "does not fit"}
MOST_REMEDIES = 5
HELPS = 0.97  # a change is named if less than this fraction remains


@dataclass(frozen=True)
class Need:
    """The memory that a rank needs, in bytes."""

    pp_rank: int
    memory: Memory
    low: int  # what the allocator reserves, at least
    high: int  # at most

    def verdict(self, available: int) -> str:
        """`fits`, `may fit` or `does not fit`; the CUDA context needs some memory too."""
        return VERDICTS[range_fits(self.low, self.high, available)]


@dataclass(frozen=True)
class Remedy:
    """A change of one key, and what the fullest rank then needs."""

    change: str  # as in a config: section.key = value
    need: Need


def estimated_needs(config: Config, llama: LlamaConfig, gpus: int) -> list[Need]:
    """The estimated need of each rank of the pp axis. Raises ConfigError."""
    needs = []
    counts = estimate(config, llama, gpus)
    for rank in counts.ranks:
        low, high = reserved_bytes(rank.memory, sharded_gradients(rank, counts.degrees))
        needs.append(Need(rank.pp_rank, rank.memory, low, high))
    return needs


def remedies(config: Config, llama: LlamaConfig, gpus: int) -> list[Remedy]:
    """The changes that reduce the memory of the fullest rank, the most effective first."""
    present = max(need.high for need in estimated_needs(config, llama, gpus))
    found = []
    for change, changed in _changes(config, llama):
        try:
            needs = estimated_needs(changed, llama, gpus)
        except ConfigError:  # the change contradicts another key
            continue
        worst = max(needs, key=lambda need: need.high)
        if worst.high < HELPS * present:
            found.append(Remedy(change, worst))
    found.sort(key=lambda remedy: remedy.need.high)
    return found[:MOST_REMEDIES]


def _changes(config: Config, llama: LlamaConfig) -> Iterator[tuple[str, Config]]:
    """Changes of one key each that may need less memory."""
    parallel = config.parallel
    training = config.training
    for mode in ("selective", "full"):
        recompute = replace(config.recompute, mode=mode)
        yield f'recompute.mode = "{mode}"', replace(config, recompute=recompute)
    if config.loss.num_chunks < 8:
        loss = replace(config.loss, num_chunks=8)
        yield "loss.num_chunks = 8", replace(config, loss=loss)
    for size in (training.local_batch_size // 2, 1):
        if 0 < size < training.local_batch_size:
            smaller = replace(training, local_batch_size=size)
            yield f"training.local_batch_size = {size}", replace(config, training=smaller)
    keys: dict[str, object] = {"pp_microbatch_size": max(1, parallel.pp_microbatch_size // 2)}
    keys["reshard_after_forward"] = "always"
    keys["reduce_every_microbatch"] = True
    keys["optimizer_offload"] = True
    keys["cpu_offload"] = True
    for key, value in keys.items():
        if getattr(parallel, key) != value:
            changed = replace(parallel, **{key: value})  # type: ignore[arg-type]
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"parallel.{key} = {text}", replace(config, parallel=changed)
    for axis in ("tp", "cp", "pp"):
        degree = 2 * getattr(parallel, axis)
        changed = replace(parallel, **{axis: degree, "dp_shard": -1})
        yield f"parallel.{axis} = {degree}", replace(config, parallel=changed)
    if llama.num_experts:
        yield (
            f"parallel.ep = {2 * parallel.ep}",
            replace(config, parallel=replace(parallel, ep=2 * parallel.ep)),
        )
    if parallel.dp_replicate > 1:
        changed = replace(parallel, dp_replicate=1, dp_shard=-1)
        yield "parallel.dp_replicate = 1", replace(config, parallel=changed)
    optimizer = replace(config.optimizer, state_dtype="bfloat16")
    yield 'optimizer.state_dtype = "bfloat16"', replace(config, optimizer=optimizer)


def zero_stage(config: Config, degrees: Mapping[str, int], local_batches: int) -> str:
    """The ZeRO stage that the layout corresponds to (arXiv 1910.02054)."""
    parallel = config.parallel
    shards = degrees["dp_shard"] * degrees["cp"]
    replicas = degrees["dp_replicate"]
    if shards == 1:
        return "stage 0: nothing is sharded" if replicas > 1 else "none: one data-parallel rank"
    text = "stage 3: weights, gradients and states are sharded"
    waits = degrees["pp"] > 1 or not parallel.reduce_every_microbatch
    whole_gradients = waits and (degrees["pp"] > 1 or local_batches > 1)
    mode = parallel.reshard_after_forward
    keeps_weights = mode == "never" or (mode == "default" and degrees["pp"] > 1)
    if keeps_weights and whole_gradients:
        text = "stage 1 within a step: weights and gradients are whole, states sharded"
    elif keeps_weights:
        text = "stage 2 within a step: weights are whole, gradients and states sharded"
    elif whole_gradients:
        text = "stage 3, but gradients are whole until the last local batch"
    if replicas > 1:
        text += f"; repeated in {replicas} replicas"
    return text
