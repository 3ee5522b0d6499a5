"""Which techniques fit together, whatever the sizes: the compiler, recomputation, float8, schedules.

What it is: rules on the config that `plan/layout.py` asks for with its own, and what has no effect where it was set.
"""

from __future__ import annotations

from collections.abc import Iterable

from titanlite.config import Config
from titanlite.config_parallel import PP_SCHEDULES, SPLIT_BACKWARD
from titanlite.model.flavors import LlamaConfig
from titanlite.spelling import suggestion

LINEAR = (  # of a block
    *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
)


def compiler_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """What torch.compile is needed for, and what it cannot do."""
    compile, parallel = config.compile, config.parallel
    budget = config.recompute.mode == "memory_budget"
    if budget and (compile.enabled == "false" or compile.backend == "eager"):
        yield (
            "recompute.mode = memory_budget is the compiler's; expected compile.enabled = auto or true, and "
            "compile.backend not eager"
        )
    if degrees["pp"] > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        others = ", ".join(name for name in PP_SCHEDULES if name not in SPLIT_BACKWARD)
        why = f"parallel.pp_schedule = {parallel.pp_schedule} computes a layer's two gradients apart, which"
        asked = "compile.enabled = true" if compile.enabled == "true" else "recompute.mode = memory_budget"
        if compile.enabled == "true" or (budget and compile.enabled == "auto"):
            yield f"{why} compiled blocks cannot; with {asked} use one of {others}"
        if config.recompute.mode == "selective":
            yield f"{why} recompute.mode = selective cannot; use recompute.mode = full, or one of {others}"


def float8_problems(config: Config, llama: LlamaConfig, degrees: dict[str, int]) -> Iterable[str]:
    """What float8 layers cannot be part of, and names that skip nothing or all."""
    if not config.float8.enabled:
        return
    if degrees["tp"] > 1:
        yield "float8.enabled = true: its layers are not cut; expected parallel.tp = 1"
    names = [f"layers.{i}.{name}" for i in range(llama.num_layers) for name in LINEAR]
    for part in config.float8.skipped:
        if not any(part in name for name in names):
            near = suggestion(part, [*LINEAR, *(f"layers.{i}." for i in range(llama.num_layers))])
            yield f"float8.skip: {part} is in the name of no linear layer; expected parts of {', '.join(LINEAR)}{near}"
    if all(any(part in name for part in config.float8.skipped) for name in names):
        yield f"float8.skip = {config.float8.skip!r} skips all linear layers; expected some, or float8.enabled = false"


def without_effect(config: Config, degrees: dict[str, int]) -> list[str]:
    """Keys that were set and belong to a technique that is not in use, in words."""
    techniques = {  # what switches it on, whether it is, its keys
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
