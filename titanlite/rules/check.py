"""Which settings fit together: sizes with degrees, and techniques with each other.

What it is: arithmetic on the config, done before torch is imported. Every condition of a technique
on the sizes it divides or on another technique is here, or in a separate file that is imported if
the technique is used. Each violation gives one message with the keys, the values found and the
nearest values that fit. Two more functions decide whether `compile.enabled = auto` compiles, and
list the settings that have no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping

from titanlite.config.schema import SPLIT_BACKWARD, WIDE, Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.degrees import resolve_degrees
from titanlite.runtime.errors import ConfigError

Check = Callable[[Config, LlamaConfig, dict[str, int]], Iterable[str]]


def check_layout(config: Config, llama: LlamaConfig, world_size: int) -> dict[str, int]:
    """Axis -> degree. Raises ConfigError with everything that does not fit."""
    degrees = resolve_degrees(config.parallel, world_size)
    checks: list[Check] = [_batch, _compiler]
    if config.parallel.reshard_after_forward not in ("default", "always", "never"):
        from titanlite.rules.fsdp_rules import sharding_problems

        checks.append(sharding_problems)
    if degrees["tp"] > 1:
        from titanlite.rules.tensor_rules import tensor_problems

        checks.append(tensor_problems)
    if degrees["cp"] > 1:
        from titanlite.rules.context_rules import context_problems

        checks.append(context_problems)
    if degrees["pp"] > 1:
        from titanlite.rules.pipeline_rules import pipeline_problems

        checks.append(pipeline_problems)
    if config.stability.action != "stop" or config.stability.threshold:
        from titanlite.rules.stability_rules import stability_problems

        checks.append(stability_problems)
    if config.metrics.noise_scale_freq:
        from titanlite.rules.noise_scale_rules import noise_scale_problems

        checks.append(noise_scale_problems)
    if config.optimizer.groups:
        from titanlite.rules.group_rules import group_problems

        checks.append(group_problems)
    if config.run.device == "mps":
        from titanlite.rules.apple_rules import apple_problems

        checks.append(apple_problems)
    offload = config.parallel.optimizer_offload or config.recompute.offload
    if config.float8.enabled or config.training.compute_dtype == "float16" or offload:
        from titanlite.rules.precision_rules import precision_problems

        checks.append(precision_problems)
    problems = [problem for check in checks for problem in check(config, llama, degrees)]
    if problems:
        raise ConfigError(problems)
    return degrees


def _batch(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """Sequences are divided over data parallel ranks."""
    training = config.training
    readers = degrees["dp_replicate"] * degrees["dp_shard"]
    if training.batch_ramp or training.global_batch_size % (training.local_batch_size * readers):
        from titanlite.config.batch_sizes import size_problems

        yield from size_problems(training, readers)


def _compiler(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """`memory_budget` and `async_tp` need torch.compile."""
    compile = config.compile
    device = "cuda" if config.run.device == "auto" else config.run.device
    why = reason_not_compiled(config, degrees, llama.dim, device)
    inductor = not why and config.compile.backend == "inductor" and device == "cuda"
    if config.parallel.async_tp and not (degrees["tp"] > 1 and inductor):
        yield (
            "parallel.async_tp = true: the compiler overlaps it on GPUs; expected parallel.tp > 1, "
            "compile.enabled = true, compile.backend = inductor and not run.device = cpu"
        )
    if config.recompute.mode == "memory_budget" and (
        compile.enabled == "false" or compile.backend == "eager"
    ):
        yield (
            "recompute.mode = memory_budget needs the compiler; expected compile.enabled = auto or true, and "
            "compile.backend not eager"
        )


def reason_not_compiled(
    config: Config, degrees: Mapping[str, int], dim: int, device_type: str
) -> str:
    """Why the blocks of a model of width `dim` are not compiled on a device (cuda, cpu, mps); empty
    if they are.
    """
    compile = config.compile
    parallel = config.parallel
    if compile.enabled != "auto":
        return "" if compile.enabled == "true" else "compile.enabled = false"
    if config.recompute.mode == "memory_budget":
        return ""
    if device_type == "cpu" and dim < WIDE:
        return f"the model is less than {WIDE} wide, on a CPU"
    if device_type != "cuda" and sys.platform != "linux":
        return "compiling has been tried on Linux only"
    if degrees["pp"] > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        return f"{parallel.pp_schedule} computes a block's two gradients in separate calls"
    if degrees["cp"] > 1 and parallel.cp_method == "ring":
        return "ring attention replaces the attention function that they call"
    return ""


def unused_settings(config: Config, degrees: dict[str, int]) -> list[str]:
    """A message for each key that differs from its default although its technique is not used."""
    parallel = config.parallel
    training = config.training
    optimizer = config.optimizer
    stability = config.stability
    recompute = config.recompute
    shape = config.schedule.name
    dtype = training.compute_dtype
    end = "steps" if config.schedule.decay_steps else "fraction"  # the latter is then 0
    fsdp = (
        math.prod(degrees.values()) > 1
        or parallel.cpu_offload
        or parallel.reshard_after_forward != "default"
    )
    fp32_state = optimizer.state_dtype == training.param_dtype == "float32"
    of_pp = " ".join(name for name in vars(parallel) if name.startswith("pp_"))
    of_muon = " ".join(name for name in vars(optimizer) if name.startswith("muon_"))
    servers = bool({"wandb", "mlflow"} & set(config.metrics.sinks))
    # Reason that its keys have no effect, whether it is used, section and names of the keys
    techniques = [
        ("parallel.pp = 1", degrees["pp"] > 1, "parallel", of_pp),
        ("parallel.cp = 1", degrees["cp"] > 1, "parallel", "cp_method"),
        (
            f"recompute.mode = {recompute.mode}",
            recompute.mode in ("full", "selective"),
            "recompute",
            "every",
        ),
        (
            "recompute.mode is not memory_budget",
            recompute.mode == "memory_budget",
            "recompute",
            "budget",
        ),
        ("one process does not use FSDP", fsdp, "parallel", "prefetch reduce_every_microbatch"),
        ("one process does not use FSDP", fsdp, "training", "reduce_dtype"),
        (
            f"training.compute_dtype = {dtype}",
            dtype == "float16",
            "training",
            "loss_scale loss_scale_growth",
        ),
        ("float8.enabled = false", config.float8.enabled, "float8", "skip scaling emulate"),
        ("schedule.name is not wsd", shape == "wsd", "schedule", f"decay decay_{end}"),
        ("schedule.name is not step", shape == "step", "schedule", "milestones"),
        ("schedule.name = constant", shape != "constant", "schedule", "min_ratio"),
        ("moments or parameters are bfloat16", fp32_state, "optimizer", "implementation"),
        ("optimizer.name = adamw", optimizer.name == "muon", "optimizer", of_muon),
        ("optimizer.clip = norm", optimizer.clip == "agc", "optimizer", "agc_factor"),
        ("optimizer.clip = agc", optimizer.clip == "norm", "training", "max_norm"),
        ("stability.threshold = 0", stability.threshold > 0, "stability", "window warmup_steps"),
        ("stability.action is not skip", stability.action == "skip", "stability", "max_skips"),
        (
            "stability.action is not rollback",
            stability.action == "rollback",
            "stability",
            "max_rollbacks",
        ),
        ("ema.decay = 0", config.ema.decay > 0, "ema", "validate"),
        ("validation.freq = 0", config.validation.freq > 0, "validation", "prompts"),
        (
            "validation.prompts is empty",
            config.validation.prompts,
            "validation",
            "prompt_tokens prompt_temperature",
        ),
        (
            "metrics.sinks has neither wandb nor mlflow",
            servers,
            "metrics",
            "project wandb_mode mlflow_uri",
        ),
    ]
    default = Config()
    notes = []
    for why, used, section, names in techniques:
        for name in names.split() if not used else ():
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(default, section), name):
                notes.append(f"{section}.{name} = {value} has no effect: {why}")
    return notes
