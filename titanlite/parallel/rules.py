"""Which settings fit together: sizes with degrees, and techniques with each other.

What it is: arithmetic on the config, done before torch is imported. Every condition of a technique on the sizes
it divides or on another technique is here; each violation gives one message with the keys, the values found and the
nearest values that fit. Two more functions decide whether `compile.enabled = auto` compiles, and list the settings that
have no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping

from titanlite.config.schema import (
    PP_SCHEDULES,
    SPLIT_BACKWARD,
    V_SHAPED,
    WIDE,
    Config,
    ConfigError,
    ParallelConfig,
    suggestion,
)
from titanlite.model.flavors import BLOCK_LINEAR, LlamaConfig
from titanlite.parallel.layout import nearest, resolve_degrees


def check_layout(config: Config, llama: LlamaConfig, world_size: int) -> dict[str, int]:
    """Axis -> degree. Raises ConfigError with everything that does not fit."""
    degrees = resolve_degrees(config.parallel, world_size)
    checks = (_batch, _sharding, _tensor, _context, _pipeline, compiler_problems, float8_problems)
    if problems := [problem for check in checks for problem in check(config, llama, degrees)]:
        raise ConfigError(problems)
    return degrees


def _batch(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Sequences are divided over data parallel ranks."""
    training = config.training
    readers = degrees["dp_replicate"] * degrees["dp_shard"]
    portion = training.local_batch_size * readers
    if training.global_batch_size % portion:
        yield (
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of "
            f"training.local_batch_size = {training.local_batch_size} times {readers} data-parallel processes "
            f"({portion}); nearest: {_multiples(training.global_batch_size, portion)}, or another local batch size"
        )


def _sharding(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """FSDP2's options."""
    mode, size = config.parallel.reshard_after_forward, degrees["dp_shard"] * degrees["cp"]
    if mode in ("default", "always", "never"):
        return
    if mode.isdecimal() and degrees["pp"] * degrees["tp"] > 1:
        # A deadlock: FSDP2 makes process groups on each row of the mesh alone, but all ranks must take part in each.
        yield (
            f'parallel.reshard_after_forward = "{mode}": a number works without parallel.pp and parallel.tp only; '
            "with them use default, always or never"
        )
        return
    groups = [n for n in range(2, size) if size % n == 0]
    if not mode.isdecimal():
        near = suggestion(mode, ["default", "always", "never"])
        yield f'parallel.reshard_after_forward = "{mode}": expected default, always, never or a number{near}'
    elif int(mode) not in groups:
        allowed = ", ".join(map(str, groups)) or f"none for {size}, so use default, always or never"
        yield (
            f'parallel.reshard_after_forward = "{mode}": expected a number of processes that divides '
            f"parallel.dp_shard x parallel.cp = {size} and is neither 1 nor all of them; allowed: {allowed}"
        )


def _tensor(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Heads, hidden width and vocabulary are divided over tp, and so is the sequence between the layers."""
    tp, cp = degrees["tp"], degrees["cp"]
    sizes = {
        "model.num_heads": llama.num_heads,
        "model.num_kv_heads": llama.num_kv_heads,
        "model.ffn_dim": llama.ffn_dim,
        "model.vocab_size": llama.vocab_size,
    }
    if config.training.seq_len % cp == 0:  # otherwise _context reports the mistake
        name = "training.seq_len / parallel.cp" if cp > 1 else "training.seq_len"
        sizes[name] = config.training.seq_len // cp
    if broken := [f"{name} = {size}" for name, size in sizes.items() if size % tp]:
        near = nearest(tp, lambda n: all(size % n == 0 for size in [*sizes.values(), _world(degrees)]), llama.num_heads)
        yield f"parallel.tp = {tp} does not divide {' and '.join(broken)}; nearest that divide all: {near}"
    device = "cpu" if config.run.device == "cpu" else "cuda"
    why = reason_not_compiled(config, degrees, llama.dim, device)
    inductor = not why and config.compile.backend == "inductor" and device == "cuda"
    if config.parallel.async_tp and not (tp > 1 and inductor):
        yield (
            "parallel.async_tp = true: the compiler overlaps it on GPUs; expected parallel.tp > 1, "
            "compile.enabled = true, compile.backend = inductor and not run.device = cpu"
        )


def _context(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """The sequence is divided over cp, into two chunks per rank; for Ulysses heads are divided as well."""
    cp, tp, method, seq_len = degrees["cp"], degrees["tp"], config.parallel.cp_method, config.training.seq_len
    if cp == 1:
        return
    if method == "ring" and config.run.device == "cpu":
        yield "parallel.cp_method = ring needs CUDA devices; with run.device = cpu: all_gather or ulysses"
    if method != "ulysses":
        if seq_len % (2 * cp):
            near = nearest(
                cp, lambda n: n == 1 or (seq_len % (2 * n) == 0 and _world(degrees) % n == 0), _world(degrees)
            )
            yield (
                f"training.seq_len = {seq_len} is not a multiple of 2 x parallel.cp = {2 * cp} (each process has a "
                f"chunk from the head and one from the tail); nearest: {_multiples(seq_len, 2 * cp)}, "
                f"or parallel.cp = {near}"
            )
        return
    sizes = {
        "training.seq_len": seq_len,
        "model.num_heads / parallel.tp": llama.num_heads // tp,
        "model.num_kv_heads / parallel.tp": llama.num_kv_heads // tp,
    }
    if broken := [f"{name} = {size}" for name, size in sizes.items() if size % cp]:
        near = nearest(cp, lambda n: all(size % n == 0 for size in [*sizes.values(), _world(degrees)]), llama.num_heads)
        yield (
            f"parallel.cp = {cp} with parallel.cp_method = ulysses does not divide {' and '.join(broken)}; "
            f"nearest that divide all: {near}; all_gather needs no heads to divide"
        )


def _pipeline(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Layers are divided over stages, and each schedule needs certain numbers of microbatches."""
    parallel, pp, name = config.parallel, degrees["pp"], config.parallel.pp_schedule
    if pp == 1:
        return
    per, usual = parallel.stages_per_process, PP_SCHEDULES[name]
    stages = pp * per
    if per != usual and (usual == 1 or name in V_SHAPED):
        yield f"parallel.pp_stages_per_process = {per}: {name} needs {usual} (or 0)"
        return
    if llama.num_layers < stages:
        near = nearest(pp, lambda n: n * per <= llama.num_layers and _world(degrees) % n == 0, llama.num_layers)
        yield (
            f"parallel.pp = {pp} with {per} stages each ({name}) needs at least {stages} layers; model.num_layers = "
            f"{llama.num_layers}; nearest parallel.pp: {near or 'only 1'}"
        )
    yield from _split(parallel, stages, llama.num_layers)
    if not parallel.reduce_every_microbatch:
        yield "parallel.reduce_every_microbatch = false: a pipeline sums gradients once per local batch; leave it true"
    batch, size = config.training.local_batch_size, parallel.pp_microbatch_size
    if batch % size:
        near = nearest(size, lambda n: batch % n == 0, batch)
        yield (
            f"parallel.pp_microbatch_size = {size} does not divide training.local_batch_size = {batch}; "
            f"nearest that do: {near}"
        )
    elif not _fits_schedule(name, batch // size, pp, stages):
        whole = config.training.global_batch_size // (degrees["dp_replicate"] * degrees["dp_shard"])
        near = nearest(
            batch,
            lambda n: n % size == 0 and whole % n == 0 and _fits_schedule(name, n // size, pp, stages),
            whole,
        )
        yield (
            f"training.local_batch_size = {batch} is {batch // size} microbatches of parallel.pp_microbatch_size = "
            f"{size}, which parallel.pp_schedule = {name} with {pp} processes and {stages} stages does not take; "
            f"nearest that do: {near or 'none with this training.global_batch_size, raise it'}"
        )


def _fits_schedule(name: str, microbatches: int, pp: int, stages: int) -> bool:
    """Whether torch's schedule of that name runs this number of microbatches."""
    if name in ("1F1B", "DualPipeV"):
        return microbatches >= stages
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // pp) == 0
    return True


def _split(parallel: ParallelConfig, stages: int, num_layers: int) -> Iterable[str]:
    """`parallel.pp_split` has one module name for each stage but the first, in the model's order."""
    names, text = parallel.stage_starts, parallel.pp_split
    if not names:
        return
    order = [*(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    for name in names:
        if name not in order:
            yield f"parallel.pp_split: no module {name!r}{suggestion(name, order)}; allowed: layers.N, norm, output"
            return
    if len(names) != stages - 1:
        yield f"parallel.pp_split = {text!r} names {len(names)}; expected {stages - 1}, one per later stage"
        return
    positions = [order.index(name) for name in names]
    if positions != sorted(set(positions)):
        yield f"parallel.pp_split = {text!r}: expected each name once and in the model's order"


def _multiples(value: int, of: int) -> str:
    """The multiples of `of` nearest to `value`, in words."""
    below = value // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)


def _world(degrees: dict[str, int]) -> int:
    return math.prod(degrees.values())


def compiler_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """`memory_budget` needs torch.compile; split-backward schedules support neither it nor `selective`."""
    compile, parallel = config.compile, config.parallel
    budget = config.recompute.mode == "memory_budget"
    if budget and (compile.enabled == "false" or compile.backend == "eager"):
        yield (
            "recompute.mode = memory_budget needs the compiler; expected compile.enabled = auto or true, and "
            "compile.backend not eager"
        )
    if degrees["pp"] > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        others = ", ".join(name for name in PP_SCHEDULES if name not in SPLIT_BACKWARD)
        why = f"parallel.pp_schedule = {parallel.pp_schedule} computes a layer's two gradients in separate calls, which"
        asked = "compile.enabled = true" if compile.enabled == "true" else "recompute.mode = memory_budget"
        if compile.enabled == "true" or (budget and compile.enabled == "auto"):
            yield f"{why} compiled blocks do not support; with {asked} use one of {others}"
        if config.recompute.mode == "selective":
            yield f"{why} recompute.mode = selective does not support; use recompute.mode = full, or one of {others}"


def float8_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """float8 does not support tp; each name in `float8.skip` must match a layer, and some layers must be left."""
    if not config.float8.enabled:
        return
    if degrees["tp"] > 1:
        yield "float8.enabled = true: its layers do not support tensor parallel; expected parallel.tp = 1"
    names = [f"layers.{i}.{name}" for i in range(llama.num_layers) for name in BLOCK_LINEAR]
    for part in config.float8.skipped:
        if not any(part in name for name in names):
            near = suggestion(part, [*BLOCK_LINEAR, *(f"layers.{i}." for i in range(llama.num_layers))])
            allowed = ", ".join(BLOCK_LINEAR)
            yield f"float8.skip: no linear layer has {part} in its name; expected parts of {allowed}{near}"
    if all(any(part in name for part in config.float8.skipped) for name in names):
        yield f"float8.skip = {config.float8.skip!r} skips all linear layers; expected some, or float8.enabled = false"


def reason_not_compiled(config: Config, degrees: Mapping[str, int], dim: int, device_type: str) -> str:
    """Why the blocks of a model of width `dim` are not compiled on a device (cuda, cpu); empty if they are."""
    compile, parallel = config.compile, config.parallel
    if compile.enabled != "auto":
        return "" if compile.enabled == "true" else "compile.enabled = false"
    if config.recompute.mode == "memory_budget":
        return ""
    if device_type == "cpu" and dim < WIDE:
        return f"the model is less than {WIDE} wide, on a CPU"
    if device_type == "cpu" and sys.platform != "linux":
        return "compiling for a CPU has been tried on Linux only"
    if degrees["pp"] > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        return f"{parallel.pp_schedule} computes a block's two gradients in separate calls"
    if degrees["cp"] > 1 and parallel.cp_method == "ring":
        return "ring attention replaces the attention function that they call"
    return ""


def unused_settings(config: Config, degrees: dict[str, int]) -> list[str]:
    """A message for each key that differs from its default although its technique is not used."""
    techniques = {  # reason that its keys have no effect -> (whether it is used, its keys)
        "parallel.pp = 1": (degrees["pp"] > 1, [f"parallel.{n}" for n in vars(config.parallel) if n.startswith("pp_")]),
        "parallel.cp = 1": (degrees["cp"] > 1, ["parallel.cp_method"]),
        f"recompute.mode = {config.recompute.mode}": (
            config.recompute.mode in ("full", "selective"),
            ["recompute.every"],
        ),
        "moments or parameters are bfloat16": (
            config.optimizer.state_dtype == config.training.param_dtype == "float32",
            ["optimizer.implementation"],
        ),
        "one process does not use FSDP": (
            math.prod(degrees.values()) > 1
            or config.parallel.cpu_offload
            or config.parallel.reshard_after_forward != "default",
            ["parallel.prefetch", "parallel.reduce_every_microbatch", "training.reduce_dtype"],
        ),
        "float8.enabled = false": (config.float8.enabled, ["float8.skip", "float8.emulate"]),
        "recompute.mode is not memory_budget": (config.recompute.mode == "memory_budget", ["recompute.budget"]),
    }
    default = Config()
    notes = []
    for why, (used, keys) in techniques.items():
        for key in keys if not used else ():
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(default, section), name):
                notes.append(f"{key} = {value} has no effect: {why}")
    return notes
