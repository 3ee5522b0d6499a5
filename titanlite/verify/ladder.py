"""Which layouts `titanlite verify` runs.

What it is: a list of cases, each some degrees and options by name. Every factorisation of the allowed numbers of
processes over at most three of the five axes is a case, and the options of each technique follow, where they matter.
No torch here: the ladder can be printed, and a layout that does not fit the model is known before anything runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.config import PP_SCHEDULES, Config, ConfigError
from titanlite.configure import all_keys, load_config
from titanlite.model.flavors import LlamaConfig
from titanlite.plan.layout import AXES, SPLIT_BACKWARD, check_layout
from titanlite.spelling import suggestion

SEQUENCES = 8  # per step, over all processes; more where there are more processes
QUICK = 4  # degrees up to which --quick goes


@dataclass(frozen=True)
class Case:
    """One layout. Its name is what `--layout` takes: its options, the section left out where it is `parallel`."""

    name: str
    processes: int
    config: Config


def parse_layout(text: str) -> list[tuple[str, str]]:
    """`dp_shard=2,tp=2` -> [(parallel.dp_shard, 2), (parallel.tp, 2)]. Raises ConfigError."""
    pairs = []
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        name = name if "." in name else f"parallel.{name}"
        if name not in all_keys():
            names = [key.removeprefix("parallel.") for key in all_keys()]
            near = suggestion(name.removeprefix("parallel."), names)
            raise ConfigError(f"--layout {text}: unknown key {name}{near}; expected key=value, with commas between")
        pairs.append((name, value if equals else "true"))
    return pairs


def make_case(arguments: list[str], pairs: list[tuple[str, str]], device: str) -> Case:
    """The config of a layout: what `arguments` say, those options, degree 1 on all other axes, batches that divide."""
    given = dict(pairs)
    degrees = {axis: int(given[f"parallel.{axis}"]) for axis in AXES if given.get(f"parallel.{axis}", "x").isdecimal()}
    processes = math.prod(degrees.values())
    readers = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    sequences = max(SEQUENCES, readers)
    local = min(4, sequences // readers)  # two accumulation steps where there is one reader of eight sequences
    if degrees.get("pp", 1) > 1:
        stages = degrees["pp"] * PP_SCHEDULES[given.get("parallel.pp_schedule", "1F1B")]
        local = max(local, min(stages, sequences // readers))
    options = {f"parallel.{axis}": "1" for axis in AXES}
    options |= {"training.global_batch_size": str(sequences), "training.local_batch_size": str(local)}
    # AdamW divides a gradient by its size. Where that is rounding alone, the usual eps of 1e-8 lets a difference in the
    # last bit move a weight by the whole learning rate; 1e-5 holds such weights still, and in the reference as well.
    options |= {"optimizer.eps": "1e-5", "optimizer.decayed": "all", "run.device": device, **given}
    config = load_config([*arguments, *(f"--{key}={value}" for key, value in options.items())])
    words = (key.removeprefix("parallel.") + ("" if value == "true" else f"={value}") for key, value in pairs)
    name = ",".join(words) or "one process"
    return Case(name, processes, config)


def ladder(processes: int, quick: bool, compiler: str) -> Iterator[list[tuple[str, str]]]:
    """The options of each case for up to so many processes."""
    for degrees in layouts(processes, quick):
        yield [(f"parallel.{axis}", str(degree)) for axis, degree in degrees.items()]
    two = processes >= 2
    for schedule in (name for name in PP_SCHEDULES if name != "1F1B" and two):
        yield [("parallel.pp", "2"), ("parallel.pp_schedule", schedule)]
    if processes >= 4 and not quick:
        yield [("parallel.pp", "4"), ("parallel.pp_schedule", "Interleaved1F1B"), ("model.num_layers", "8")]
        for schedule in ("Interleaved1F1B", *SPLIT_BACKWARD):
            yield [("parallel.pp", "2"), ("parallel.dp_shard", "2"), ("parallel.pp_schedule", schedule)]
            yield [("parallel.pp", "2"), ("parallel.tp", "2"), ("parallel.pp_schedule", schedule)]
            yield [("parallel.pp", "2"), ("parallel.pp_schedule", schedule), ("recompute.mode", "full")]
    bases = [[("parallel.dp_shard", "2")], [("parallel.tp", "2")], [("parallel.cp", "2")], [("parallel.pp", "2")]]
    if two:
        yield [("parallel.cp", "2"), ("parallel.cp_method", "ulysses")]
    if processes >= 4:
        for axis in ("dp_shard", *(() if quick else ("pp",))):
            yield [(f"parallel.{axis}", "2"), ("parallel.cp", "2"), ("parallel.cp_method", "ulysses")]
        yield [("parallel.dp_shard", "4"), ("parallel.reshard_after_forward", "2")]
    sharded = bases[0] if two else []
    for option in ("reshard_after_forward=always", "reshard_after_forward=never", "cpu_offload=true", "prefetch=2"):
        yield [*sharded, (f"parallel.{option.partition('=')[0]}", option.partition("=")[2])]
    yield [*sharded, ("parallel.reduce_every_microbatch", "false"), ("training.local_batch_size", "1")]
    yield [*sharded, ("training.compute_dtype", "bfloat16")]
    for base in bases if two else [[]]:
        modes = ("full", "selective") if base in bases[:2] or not quick else ("full",)
        yield from ([*base, ("recompute.mode", mode)] for mode in modes)
    compiled = [("compile.enabled", "true"), ("compile.backend", compiler)]
    for base in (bases[:2] if quick else bases) if two else [[]]:
        yield [*base, *compiled]
        for mode in () if quick else ("full", "selective", "memory_budget"):
            yield [*base, ("recompute.mode", mode), *compiled]
    if two:
        yield [("parallel.tp", "2"), ("compile.loss", "true"), ("compile.backend", compiler)]


def layouts(processes: int, quick: bool) -> Iterator[dict[str, int]]:
    """Axis -> degree: every product of at most three axes that divides `processes`, fewest processes first."""
    sizes = [n for n in range(1, processes + 1) if processes % n == 0 and not (quick and n > QUICK)]
    for size in sizes:
        for used in range(size > 1, 4):
            for axes in itertools.combinations(AXES, used):
                for degrees in itertools.product([n for n in sizes if n > 1], repeat=used):
                    if math.prod(degrees) == size and not (quick and used == 1 and size > 2):
                        yield dict(zip(axes, degrees, strict=True))


def misfit(case: Case, llama: LlamaConfig) -> str:
    """Why a layout does not fit the model; empty if it does."""
    try:
        check_layout(case.config, llama, case.processes)
    except ConfigError as error:
        return error.problems[0]
    return ""
