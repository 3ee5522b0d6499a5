"""How a key is declared; and the sections on how a run computes: split over processes, recomputed, compiled.

What it is: a field declares its type, its default, a line for `--help` and, where it has them, its bounds or choices.
No torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Pipeline schedules, and how many stages each process holds by default
PP_SCHEDULES = dict.fromkeys(("GPipe", "1F1B"), 1)
PP_SCHEDULES |= dict.fromkeys(
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), 2
)
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # weights' gradients apart from inputs'
WIDE = 256  # the width from which a CPU gains by bfloat16 and by compiling (benchmarks/levers.py)


def key(
    default: Any, help: str, *, min: float | None = None, max: float | None = None, choices: tuple[Any, ...] = ()
) -> Any:
    """A config key: default, one line of help, and the values allowed (bounds are inclusive)."""
    return field(default=default, metadata={"help": help, "min": min, "max": max, "choices": choices})


@dataclass(frozen=True)
class Parallel:
    """How the processes share the work. The product of the five degrees is the number of processes."""

    pp: int = key(1, "pipeline stages' processes: each holds some of the layers; -1: what is left", min=-1)
    dp_replicate: int = key(1, "replicas of the model (HSDP when dp_shard > 1); -1: what is left", min=-1)
    dp_shard: int = key(-1, "processes a replica's parameters are sharded over (FSDP2); -1: what is left", min=-1)
    cp: int = key(1, "context parallel: processes a sequence is cut over; -1: what is left", min=-1)
    tp: int = key(1, "tensor parallel: processes a layer's matrices are cut over; -1: what is left", min=-1)
    reshard_after_forward: str = key(
        "default",
        "free gathered weights after the forward (less memory, more traffic): default (all but the last; never with "
        "pp > 1), always, never, or a number: keep them sharded over so many processes",
    )
    reduce_every_microbatch: bool = key(
        True, "sum gradients over processes after each microbatch (less memory); false: once per step"
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and moments in CPU memory, computing on the GPU")
    prefetch: int = key(0, "gather weights so many units ahead; 0: FSDP2's own choice, one", min=0, max=64)
    async_tp: bool = key(False, "overlap tensor parallel's communication with its matmuls (CUDA, with compile)")
    cp_method: str = key(
        "all_gather",
        "how attention sees all keys: all_gather (of keys and values), ulysses (all-to-all of heads), ring (CUDA)",
        choices=("all_gather", "ulysses", "ring"),
    )
    pp_schedule: str = key("1F1B", "order of the microbatches in the pipeline", choices=tuple(PP_SCHEDULES))
    pp_microbatch_size: int = key(1, "sequences of a microbatch; training.local_batch_size is cut into these", min=1)
    pp_stages_per_process: int = key(0, "stages each process holds; 0: what the schedule needs, 1 or 2", min=0)
    pp_split: str = key(
        "", "where each stage but the first begins, as in `layers.2, layers.4`; empty: balanced by the work"
    )

    @property
    def stages_per_process(self) -> int:
        return self.pp_stages_per_process or PP_SCHEDULES[self.pp_schedule]

    @property
    def stage_starts(self) -> list[str]:
        """The names in `pp_split`."""
        return self.pp_split.replace(",", " ").split()


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing: what is recomputed in the backward instead of kept."""

    mode: str = key(
        "none",
        "none; full: each block's input is kept; selective: costly results too (a list of operators); "
        "memory_budget: the compiler keeps what fits in `budget`",
        choices=("none", "full", "selective", "memory_budget"),
    )
    every: int = key(1, "full and selective: apply it to every n-th block only", min=1)
    budget: float = key(
        0.5, "memory_budget: part of the activations' memory to use; 1: recompute nothing", min=0, max=1
    )


@dataclass(frozen=True)
class Compile:
    """torch.compile, block by block."""

    enabled: str = key(
        "auto",
        "compile each transformer block; auto: on CUDA, and on Linux on CPUs if the model is at least 256 wide (not "
        "with what cannot be compiled), and wherever recompute.mode is memory_budget",
        choices=("auto", "true", "false"),
    )
    loss: bool = key(False, "compile the loss too")
    backend: str = key("inductor", "the compiler", choices=("inductor", "aot_eager", "eager"))


def why_not_compiled(
    compile: Compile, recompute: Recompute, parallel: Parallel, degrees: Mapping[str, int], dim: int, device: str
) -> str:
    """Why the blocks of a model `dim` wide are not compiled on a device (cuda, cpu), in words; empty where they are."""
    if compile.enabled != "auto":
        return "" if compile.enabled == "true" else "compile.enabled = false"
    if recompute.mode == "memory_budget":
        return ""
    if device == "cpu" and dim < WIDE:
        return f"less than {WIDE} wide, on a CPU"
    if device == "cpu" and sys.platform != "linux":
        return "not tried on this system's CPUs"
    if degrees["pp"] > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        return f"{parallel.pp_schedule} cannot"
    if degrees["cp"] > 1 and parallel.cp_method == "ring":
        return "ring attention patches what they call"
    return ""


@dataclass(frozen=True)
class Float8:
    """8-bit matrix products in the blocks' linear layers."""

    enabled: bool = key(False, "train with float8 (CUDA devices of compute capability 8.9 or later; with compile)")
    skip: str = key(
        "", "linear layers that keep their precision: parts of their names, as in `attention.wk, layers.0.`"
    )
    emulate: bool = key(False, "the same numbers by fp32 products, on any device, slowly")

    @property
    def skipped(self) -> list[str]:
        """The names in `skip`."""
        return self.skip.replace(",", " ").split()


@dataclass(frozen=True)
class Loss:
    """Cross entropy."""

    num_chunks: int = key(
        1,
        "project onto the vocabulary and compute the loss for so many parts of the tokens, one after the other: "
        "logits take 1/n of the memory",
        min=1,
        max=65536,
    )


@dataclass(frozen=True)
class Comm:
    """How long a process may keep the others waiting."""

    timeout_seconds: int = key(
        300, "a process that stands still for so long ends the run, which names it", min=1, max=604800
    )
    step_timeout_seconds: int = key(
        100, "the same within a training step, from the second on, if that is less", min=1, max=604800
    )

    @property
    def group_timeout_seconds(self) -> int:
        """A collective's own time-out: after the watchdog's, which knows whom the others wait for."""
        return self.timeout_seconds + 10
