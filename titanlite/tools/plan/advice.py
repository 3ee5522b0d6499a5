"""Whether a step fits into the memory of a GPU, and which keys would help if it does not.

What it is: the sum of what a rank holds, as a range, against what the GPU has. The lower end is
what the program holds with no gap between its tensors; the upper end has what allocators have been
seen to reserve beside it. Between the two the verdict is "may fit".
Why it is here: a number of bytes is no answer. The advice names the largest part that a key can
make smaller, with the key and the size that would remain. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titanlite.config.schema import Config
from titanlite.tools.plan.counts import Memory

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


@dataclass(frozen=True)
class Need:
    """The memory that a rank needs, in bytes."""

    pp_rank: int
    memory: Memory
    low: int
    high: int

    def verdict(self, available: int) -> str:
        """`fits`, `may fit` or `does not fit`."""
        if self.high <= available:
            return "fits"
        return "may fit" if self.low <= available else "does not fit"


def advice(config: Config, degrees: Mapping[str, int], memory: Memory) -> Iterator[str]:
    """What would make the largest parts smaller, the largest first."""
    parts = {name: getattr(memory, name) for name in NAMES}
    for name in sorted(parts, key=lambda name: -parts[name]):
        remedy = _remedy(name, config, degrees, parts[name])
        if remedy and parts[name] > memory.total / 20:
            yield f"{NAMES[name]} {parts[name] / GIB:,.1f} GiB: {remedy}"


def _remedy(name: str, config: Config, degrees: Mapping[str, int], nbytes: int) -> str:
    """The key that makes a part smaller, with what it costs; empty if there is none."""
    parallel = config.parallel
    if name == "logits" and config.loss.num_chunks == 1:
        return f"loss.num_chunks = 8 leaves about {nbytes / 8 / GIB:,.1f}"
    if name == "activations":
        return _less_activations(config, degrees)
    if name in ("parameters", "gradients", "optimizer"):
        if degrees["dp_replicate"] > 1:
            return "parallel.dp_shard in place of dp_replicate, which repeats them"
        if name == "optimizer" and not (parallel.optimizer_offload or parallel.cpu_offload):
            if config.optimizer.state_dtype == "float32":
                return f"optimizer.state_dtype = bfloat16 leaves {nbytes / 2 / GIB:,.1f}"
            return "parallel.optimizer_offload = true keeps them in CPU memory"
        return "more GPUs: parallel.dp_shard divides them"
    if name == "whole_gradients":
        if not parallel.reduce_every_microbatch:
            return "parallel.reduce_every_microbatch = true, with more communication"
        if degrees["pp"] > 1:
            return "a pipeline keeps them for the whole step: a smaller stage, or parallel.tp"
    if name == "gathered" and _keeps_weights(config, degrees):
        return "parallel.reshard_after_forward = always gathers them again in the backward"
    return ""


def _keeps_weights(config: Config, degrees: Mapping[str, int]) -> bool:
    """Whether weights stay gathered from the forward to the backward."""
    mode = config.parallel.reshard_after_forward
    return mode == "never" or (mode == "default" and degrees["pp"] > 1)


def _less_activations(config: Config, degrees: Mapping[str, int]) -> str:
    if config.recompute.mode == "none":
        return "recompute.mode = selective keeps about half, full a tenth, and computes them again"
    if config.recompute.mode == "selective":
        return "recompute.mode = full keeps each block's input alone"
    if config.training.local_batch_size > 1 and degrees["pp"] == 1:
        return (
            f"training.local_batch_size = {config.training.local_batch_size // 2} halves them, "
            "with more local batches per step"
        )
    if config.training.seq_len >= 8192:
        return "parallel.cp divides each sequence"
    return ""


def zero_stage(config: Config, degrees: Mapping[str, int]) -> str:
    """What the layout of weights, gradients and states is called in ZeRO (arXiv 1910.02054)."""
    parallel = config.parallel
    shards = degrees["dp_shard"] * degrees["cp"]
    if shards == 1:
        return "stage 0: every rank holds all (DDP)"
    unreduced = degrees["pp"] > 1 or not parallel.reduce_every_microbatch
    if not _keeps_weights(config, degrees):
        return "stage 3: parameters, gradients and states are sharded"
    if unreduced:
        return (
            "stage 1 within a step (whole weights and gradients), with sharded parameters between"
        )
    return "stage 2 within a step (whole weights), with sharded parameters between steps"
