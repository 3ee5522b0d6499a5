"""Checks which settings fit together: applies all rules to a config, a model and a world size.

What it is: arithmetic on the config, done before torch is imported. A rule is a generator of
messages, and yields none if all is well; each message has the keys, the values found and the
nearest values that fit. The rules are in the files of this folder:

    degrees.py    the degrees of the five mesh axes, whose product is the world size
    divides.py    sizes that must be divisible by others
    excludes.py   settings that exclude each other
    names.py      settings that name parts of the model
    unused.py     settings that have no effect: reported, not refused
    compiled.py   whether `compile.enabled = auto` compiles
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.rules import divides, excludes, names
from titanlite.rules.degrees import resolve_degrees
from titanlite.runtime.errors import ConfigError

Rule = Callable[[Config, LlamaConfig, dict[str, int]], Iterator[str]]

RULES: tuple[Rule, ...] = (
    divides.batch,
    excludes.compiler,
    divides.reshard_group,
    divides.tensor_parallel,
    divides.expert_parallel,
    excludes.experts,
    divides.context_parallel,
    divides.pipeline_stages,
    names.pipeline_split,
    excludes.pipeline_reduction,
    divides.pipeline_microbatches,
    excludes.split_backward,
    excludes.stability,
    divides.noise_scale,
    excludes.noise_scale,
    names.optimizer_groups,
    excludes.float8,
    names.float8_skip,
    names.lora,
    names.frozen,
    excludes.float16,
    excludes.offloading,
    excludes.export,
)


def check_layout(config: Config, llama: LlamaConfig, world_size: int) -> dict[str, int]:
    """Returns axis -> degree. Raises ConfigError with everything that does not fit."""
    degrees = resolve_degrees(config.parallel, world_size)
    problems: list[str] = []
    for rule in RULES:
        problems += rule(config, llama, degrees)
    if problems:
        raise ConfigError(problems)
    return degrees
