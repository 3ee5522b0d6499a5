"""The layouts that `titanlite verify` runs.

What it is: a list of cases, each with degrees and options. First every factorisation of the allowed
numbers of processes over at most three of the five axes, then the options of each technique, with
the axes that they affect.
Why it is here: no torch is imported, so a layout that does not fit the model is reported before
anything runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.config.keys import all_keys
from titanlite.config.load import load_config
from titanlite.config.mistakes import suggestion
from titanlite.config.schema import PP_SCHEDULES, SPLIT_BACKWARD, Config, sections
from titanlite.model.flavors import LlamaConfig
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import AXES
from titanlite.runtime.errors import ConfigError

SEQUENCES = 8  # per step, over all processes; more where there are more processes
MAX_PROCESSES = 64
QUICK = 4  # the largest number of processes with --quick
# The sections of the config that describe a layout
LAYOUT = ("parallel", "recompute", "compile", "ema", "loss")
RECOMPUTE_MODES = ("full", "selective", "memory_budget")


@dataclass(frozen=True)
class Case:
    """One layout.

    Its name is the argument of `--layout`: options by key, without `parallel.` in front.
    """

    name: str
    processes: int
    config: Config


def parse_layout(text: str) -> list[tuple[str, str]]:
    """`dp_shard=2,recompute.mode=full` -> [(parallel.dp_shard, 2), (recompute.mode, full)].

    Raises ConfigError.
    """
    pairs: list[tuple[str, str]] = []
    for word in (word.strip() for word in text.split(",") if text):
        name, equals, value = word.partition("=")
        if pairs and pairs[-1][0] == "parallel.pp_split" and not equals:  # whose value has commas
            pairs[-1] = ("parallel.pp_split", f"{pairs[-1][1]} {word}")
            continue
        name = name if "." in name else f"parallel.{name}"
        if name not in all_keys():
            names = [key.removeprefix("parallel.") for key in all_keys()]
            near = suggestion(name.removeprefix("parallel."), names)
            raise ConfigError(
                f"--layout {text}: unknown key {name}{near}; expected key=value, with commas "
                "between"
            )
        if name in dict(pairs):
            raise ConfigError(f"--layout {text}: {name} is given twice")
        if name.startswith("run."):
            raise ConfigError(
                f"--layout {text}: {name} is not part of a layout; set it with --{name}"
            )
        pairs.append((name, value if equals else "true"))
    return pairs


def make_case(arguments: list[str], layout: str, device: str) -> Case:
    """The config of a layout: model, data and optimizer of `arguments`, the layout's options, batch
    sizes that fit.
    """
    given = dict(parse_layout(layout))
    degrees = {axis: given.get(f"parallel.{axis}", "1") for axis in AXES}
    for axis, degree in degrees.items():
        if not re.fullmatch(r"[1-9]\d{0,5}", degree):
            raise ConfigError(
                f"--layout {layout:.99}: {axis} = {degree:.20}: expected an integer, at least 1"
            )
    processes = math.prod(int(degree) for degree in degrees.values())
    if processes > MAX_PROCESSES:
        raise ConfigError(
            f"--layout {layout}: {processes} processes; expected at most {MAX_PROCESSES}"
        )
    readers = int(degrees["dp_replicate"]) * int(degrees["dp_shard"])
    local = max(1, min(4, SEQUENCES // readers))
    # With one data-parallel rank, two local batches
    sequences = -(-SEQUENCES // (local * readers)) * local * readers
    # The layout of `arguments` is replaced by the defaults.
    own = {
        f"{s}.{f.name}": f.default
        for s in LAYOUT
        for f in dataclasses.fields(sections()[s])
        if f.name != "z_loss"
    }
    options = {key: json.dumps(value).strip('"') for key, value in own.items()}
    options |= {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    options |= {
        "training.global_batch_size": str(sequences),
        "training.local_batch_size": str(local),
    }
    options |= {"training.batch_ramp": ""}
    # AdamW divides a gradient by its size. Where a gradient is only rounding error, the usual eps
    # of 1e-8 turns a difference in the last bit into a whole learning rate. With 1e-5, here and in
    # the reference, it stays small.
    options |= {"optimizer.eps": "1e-5", "optimizer.muon_dtype": "float32"}
    options |= {"run.device": device}
    options |= {"training.compute_dtype": "float32", "training.reduce_dtype": "float32"}
    options |= {
        "compile.enabled": "auto" if given.get("recompute.mode") == "memory_budget" else "false",
        **given,
    }
    config = load_config([*arguments, *(f"--{key}={value}" for key, value in options.items())])
    return Case(layout or "one process", processes, config)


def ladder(processes: int, quick: bool, device: str) -> Iterator[str]:
    """The layouts for up to `processes` processes, as arguments of `--layout`."""
    # On CPU, inductor takes minutes to compile
    compiler = "inductor" if device == "cuda" else "aot_eager"
    for degrees in layouts(processes, quick):
        yield ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
    options = [
        "reshard_after_forward=always",
        "reshard_after_forward=never",
        "cpu_offload",
        "prefetch=2",
    ]
    options += [] if quick else ["optimizer_offload"]
    options += [
        "reduce_every_microbatch=false,training.local_batch_size=1",
        "training.compute_dtype=bfloat16",
    ]
    recompute = ["recompute.mode=full", "recompute.mode=selective"]
    recompute += [] if quick else ["recompute.mode=full,recompute.offload"]
    compiled = [
        "compile.enabled",
        *(f"recompute.mode={m},compile.enabled" for m in RECOMPUTE_MODES if not quick),
    ]
    compiled = [f"{option},compile.backend={compiler}" for option in compiled]
    yield from documents(processes, quick, compiler)
    yield from updates(processes, quick)
    if processes == 1:
        yield from (
            *options,
            *recompute,
            *compiled,
            "loss.num_chunks=3",
            "model.embeddings=untied,loss.num_chunks=3",
        )
        return
    yield from (f"pp=2,pp_schedule={schedule}" for schedule in PP_SCHEDULES if schedule != "1F1B")
    yield "cp=2,cp_method=ulysses"
    if processes >= 4:
        yield "dp_shard=2,cp=2,cp_method=ulysses"
        yield "dp_shard=4,reshard_after_forward=2"
    averaged = (
        ["dp_shard=2"]
        if quick
        else ["dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_shard=2,cpu_offload"]
    )
    averaged += ["dp_shard=2,tp=2", "dp_shard=2,pp=2"] if processes >= 4 and not quick else []
    yield from (f"{layout},ema.decay=0.9" for layout in averaged)
    if processes >= 4 and not quick:
        yield "pp=2,cp=2,cp_method=ulysses"
        yield "pp=4,pp_schedule=Interleaved1F1B,model.num_layers=8"
        for schedule in ("Interleaved1F1B", *SPLIT_BACKWARD):
            yield from (
                f"pp=2,{also},pp_schedule={schedule}"
                for also in ("dp_shard=2", "tp=2", "recompute.mode=full")
            )
    yield from (f"dp_shard=2,{option}" for option in options)
    for axis in ("dp_shard", "tp", "cp", "pp"):
        yield from (
            f"{axis}=2,{option}"
            for option in (recompute[:1] if quick and axis in ("cp", "pp") else recompute)
        )
    for axis in ("dp_shard", "tp") if quick else ("dp_shard", "tp", "cp", "pp"):
        yield from (f"{axis}=2,{option}" for option in compiled)
    yield f"tp=2,compile.loss,compile.backend={compiler}"
    yield from (f"{axis}=2,loss.num_chunks=3" for axis in ("dp_shard", "tp", "cp", "pp"))
    for axis in ("tp", "pp") if quick else ("dp_shard", "tp", "cp", "pp"):
        yield f"{axis}=2,model.embeddings=untied"
    if not quick:
        yield from (
            f"{axis}=2,model.embeddings=untied,loss.num_chunks=3"
            for axis in ("dp_shard", "tp", "pp")
        )
        yield f"tp=2,loss.num_chunks=3,compile.loss,compile.backend={compiler}"
        yield from (f"pp=2,pp_schedule={schedule},loss.num_chunks=3" for schedule in SPLIT_BACKWARD)
    if processes >= 4 and not quick:
        yield from (
            f"{axes},loss.num_chunks=3"
            for axes in ("dp_shard=2,tp=2", "pp=2,tp=2", "pp=2,dp_shard=2")
        )
        yield "dp_shard=2,loss.num_chunks=3,reshard_after_forward=always"
    for axis in () if quick else ("tp", "cp", "pp"):
        yield f"{axis}=2,training.compute_dtype=bfloat16"
    for axis in () if quick else ("dp_shard", "tp", "cp", "pp"):
        yield f"{axis}=2,training.compute_dtype=float16"
    # Of single sequences, as in the reference
    for scaling in () if quick else ("tensorwise", "rowwise"):
        float8 = f"float8.enabled,float8.emulate,float8.scaling={scaling}"
        yield f"tp=2,{float8},training.local_batch_size=1"
    if processes >= 4 and not quick:
        yield from (f"pp=2,tp=2,pp_split=output{also}" for also in ("", ",loss.num_chunks=3"))
    if device == "cuda":
        yield from (
            "cp=2,cp_method=ring",
            "cp=2,cp_method=ulysses,compile.enabled",
            "tp=2,async_tp,compile.enabled",
        )
        yield "pp=2,pp_schedule=Interleaved1F1B,compile.enabled"


def documents(processes: int, quick: bool, compiler: str) -> Iterator[str]:
    """Layouts with several documents in a sequence, each of which is computed alone in the
    reference.
    """
    compiled = f"compile.enabled,compile.backend={compiler}"
    one = ["", *(f"recompute.mode={mode}," for mode in RECOMPUTE_MODES[:2] if not quick)]
    one += [] if quick else [f"recompute.mode=memory_budget,{compiled},"]
    several = ["tp=2,", "cp=2,", "cp=2,cp_method=ulysses,", "pp=2,", f"dp_shard=2,{compiled},"]
    if not quick:
        several += [f"{axis}=2,{compiled}," for axis in ("tp", "cp", "pp")]
        several += [
            f"{axis}=2,recompute.mode={mode},"
            for axis in ("tp", "cp", "pp")
            for mode in RECOMPUTE_MODES[:2]
        ]
        several += [
            f"pp=2,pp_schedule={schedule}," for schedule in ("Interleaved1F1B", *SPLIT_BACKWARD)
        ]
    if processes >= 4 and not quick:
        several += ["cp=2,tp=2,", "pp=2,cp=2,", "pp=2,tp=2,", "dp_shard=2,cp=2,cp_method=ulysses,"]
    yield from (
        f"{layout}data.document_mask" for layout in (one if processes == 1 else one + several)
    )


def updates(processes: int, quick: bool) -> Iterator[str]:
    """Layouts with another optimizer, clipping and loss."""
    muon = "optimizer.name=muon"
    agc = "optimizer.clip=agc"
    z_loss = "loss.z_loss=1e-2"
    together = f"{muon},{agc},{z_loss}"
    two = ["dp_shard=2", "tp=2", "pp=2", "cp=2"] if processes > 1 else []
    four = ["dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "pp=2,tp=2"] if processes >= 4 else []
    if quick:
        yield from (f"{layout},{together}" for layout in two[2:3] + four[:1])
        return
    for option in (muon, agc, z_loss):
        yield from (f"{layout},{option}" for layout in two + four)
    yield from (f"{layout},loss.num_chunks=3,{z_loss}" for layout in two)
    yield from (f"{layout},model.embeddings=untied,{together}" for layout in two + four)


def layouts(processes: int, quick: bool) -> Iterator[dict[str, int]]:
    """Axis -> degree for every product of at most three axes that is a power of two or divides
    `processes`.
    """
    most = min(processes, QUICK) if quick else processes
    sizes = [n for n in range(1, most + 1) if processes % n == 0 or n.bit_count() == 1]
    for size in sizes:
        for used in range(size > 1, 4):
            for axes in itertools.combinations(AXES, used):
                for degrees in itertools.product([n for n in sizes if n > 1], repeat=used):
                    if math.prod(degrees) == size and not (quick and used == 1 and size > 2):
                        yield dict(zip(axes, degrees, strict=True))


def reason_not_fitting(case: Case, llama: LlamaConfig) -> str:
    """The reason why a layout does not fit the model; "" if it fits."""
    try:
        check_layout(case.config, llama, case.processes)
    except ConfigError as error:
        return error.problems[0]
    return ""
