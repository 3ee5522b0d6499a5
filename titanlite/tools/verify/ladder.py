"""Lists the layouts that `titanlite verify` runs.

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
from collections.abc import Iterator, Sequence
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
# A mixture of experts in place of the feed-forward, with its auxiliary loss
EXPERTS = {
    "model.num_experts": "4",
    "model.experts_per_token": "2",
    "model.expert_ffn_dim": "96",
    "loss.router_aux_loss": "0.1",
}
# The settings of each layout that names no others; batch sizes depend on the degrees
SETTINGS = {
    "training.batch_ramp": "",
    # AdamW divides a gradient by its size. Where a gradient is only rounding error, the usual eps
    # of 1e-8 turns a difference in the last bit into a whole learning rate. With 1e-5, here and in
    # the reference, it stays small.
    "optimizer.eps": "1e-5",
    "optimizer.muon_dtype": "float32",
    "training.compute_dtype": "float32",
    "training.reduce_dtype": "float32",
    "compile.enabled": "false",
}
BATCH_SIZES = ("training.global_batch_size", "training.local_batch_size")
TWO_RANKS = ("dp_shard=2", "tp=2", "cp=2", "pp=2")  # each axis alone


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
    words = text.split(",") if text else []
    for word in words:
        name, equals, value = word.strip().partition("=")
        if pairs and pairs[-1][0] == "parallel.pp_split" and not equals:  # whose value has commas
            pairs[-1] = ("parallel.pp_split", f"{pairs[-1][1]} {name}")
            continue
        if "." not in name:
            name = f"parallel.{name}"
        if name not in all_keys():
            names = [key.removeprefix("parallel.") for key in all_keys()]
            nearest = suggestion(name.removeprefix("parallel."), names)
            raise ConfigError(
                f"--layout {text}: unknown key {name}{nearest}; expected key=value, with commas "
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


def layout_settings() -> dict[str, str]:
    """The keys that replace those of a config, with their values: the defaults of its layout, but
    for the terms of the loss, and `SETTINGS`.
    """
    settings: dict[str, str] = {}
    for section in LAYOUT:
        for field in dataclasses.fields(sections()[section]):
            if field.name not in ("z_loss", "router_aux_loss"):
                settings[f"{section}.{field.name}"] = json.dumps(field.default).strip('"')
    return settings | SETTINGS


def make_case(arguments: list[str], layout: str, device: str) -> Case:
    """The config of a layout: model, data and optimizer of `arguments`, and fitting batch sizes."""
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
    data_size = int(degrees["dp_replicate"]) * int(degrees["dp_shard"])
    local_batch_size = max(1, min(4, SEQUENCES // data_size))
    # A multiple of what all ranks read at once; with one data-parallel rank, two local batches
    at_once = local_batch_size * data_size
    global_batch_size = math.ceil(SEQUENCES / at_once) * at_once
    options = layout_settings()
    options |= {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    options["training.global_batch_size"] = str(global_batch_size)
    options["training.local_batch_size"] = str(local_batch_size)
    options["run.device"] = device
    if given.get("recompute.mode") == "memory_budget":  # which is the compiler's
        options["compile.enabled"] = "auto"
    options |= given
    config = load_config([*arguments, *(f"--{key}={value}" for key, value in options.items())])
    return Case(layout or "one process", processes, config)


def each(layouts: Sequence[str], options: Sequence[str]) -> list[str]:
    """Combines every option with every layout."""
    return [f"{layout},{option}" for layout in layouts for option in options]


def compiler_of(device: str) -> str:
    """The backend of torch.compile; on a CPU not inductor, which takes minutes."""
    return "inductor" if device == "cuda" else "aot_eager"


def ladder(processes: int, quick: bool, device: str) -> list[str]:
    """The layouts for up to `processes` processes, as arguments of `--layout`."""
    names = []
    for degrees in layouts(processes, quick):
        names.append(",".join(f"{axis}={degree}" for axis, degree in degrees.items()))
    compiler = compiler_of(device)
    names += documents(processes, quick, compiler)
    names += updates(processes, quick)
    if processes == 1:
        names += sharding_options(quick)
        names += recompute_options(quick)
        names += compile_options(quick, compiler)
        names += ["loss.num_chunks=3", "model.embeddings=untied,loss.num_chunks=3"]
        return names
    names += axis_options(processes, quick)
    names += averages(processes, quick)
    names += techniques(quick, compiler)
    names += losses(processes, quick, compiler)
    names += experts(processes, quick, compiler)
    if not quick:
        names += dtypes()
        names += families(processes)
        names += windows(processes, compiler)
        names += adapters(processes, compiler)
        names += frozen(processes)
    if device == "cuda":
        names += [
            "cp=2,cp_method=ulysses,compile.enabled",
            "tp=2,async_tp,compile.enabled",
            "pp=2,pp_schedule=Interleaved1F1B,compile.enabled",
        ]
    return names


def axis_options(processes: int, quick: bool) -> list[str]:
    """Options of an axis: schedules of the pipeline, methods of cp, resharding."""
    schedules = [f"pp_schedule={name}" for name in PP_SCHEDULES if name != "1F1B"]  # the default
    names = each(["pp=2"], schedules)
    names.append("cp=2,cp_method=ulysses")
    if processes < 4:
        return names
    names += ["dp_shard=2,cp=2,cp_method=ulysses", "dp_shard=4,reshard_after_forward=2"]
    if quick:
        return names
    names += [
        "pp=2,cp=2,cp_method=ulysses",
        "pp=4,pp_schedule=Interleaved1F1B,model.num_layers=8",
        "pp=2,tp=2,pp_split=output",
        "pp=2,tp=2,pp_split=output,loss.num_chunks=3",
    ]
    several_stages = [f"pp_schedule={name}" for name in ("Interleaved1F1B", *SPLIT_BACKWARD)]
    beside = ["pp=2,dp_shard=2", "pp=2,tp=2", "pp=2,recompute.mode=full"]
    return names + each(beside, several_stages)


def averages(processes: int, quick: bool) -> list[str]:
    """Layouts whose averaged weights are compared too."""
    names = ["dp_shard=2"]
    if not quick:
        names += ["tp=2", "cp=2", "pp=2", "dp_shard=2,cpu_offload"]
    if not quick and processes >= 4:
        names += ["dp_shard=2,tp=2", "dp_shard=2,pp=2"]
    return each(names, ["ema.decay=0.9"])


def sharding_options(quick: bool) -> list[str]:
    """Options of FSDP: when it gathers, reduces and offloads, and in which dtype."""
    options = [
        "reshard_after_forward=always",
        "reshard_after_forward=never",
        "cpu_offload",
        "prefetch=2",
    ]
    if not quick:
        options.append("optimizer_offload")
    options.append("reduce_every_microbatch=false,training.local_batch_size=1")
    options.append("training.compute_dtype=bfloat16")
    return options


def recompute_options(quick: bool) -> list[str]:
    options = ["recompute.mode=full", "recompute.mode=selective"]
    if not quick:
        options.append("recompute.mode=full,recompute.offload")
    return options


def compile_options(quick: bool, compiler: str) -> list[str]:
    compiled = f"compile.enabled,compile.backend={compiler}"
    options = [compiled]
    if not quick:
        options += [f"recompute.mode={mode},{compiled}" for mode in RECOMPUTE_MODES]
    return options


def techniques(quick: bool, compiler: str) -> list[str]:
    """Layouts with sharding, recomputation and compilation, and the axes that they affect."""
    names = each(["dp_shard=2"], sharding_options(quick))
    compiled = compile_options(quick, compiler)
    recompute = recompute_options(quick)
    if quick:
        names += each(["dp_shard=2", "tp=2"], recompute)
        names += each(["cp=2", "pp=2"], ["recompute.mode=full"])
        names += each(["dp_shard=2", "tp=2"], compiled)
    else:
        names += each(TWO_RANKS, recompute)
        names += each(TWO_RANKS, compiled)
    return names


def losses(processes: int, quick: bool, compiler: str) -> list[str]:
    """Layouts with a compiled loss, a loss in chunks, and embeddings that are not tied."""
    chunked = "loss.num_chunks=3"
    untied = "model.embeddings=untied"
    compiled = f"compile.loss,compile.backend={compiler}"
    names = [f"tp=2,{compiled}"]
    names += each(TWO_RANKS, [chunked])
    if quick:
        return names + each(["tp=2", "pp=2"], [untied])
    names += each(TWO_RANKS, [untied])
    names += each(["dp_shard=2", "tp=2", "pp=2"], [f"{untied},{chunked}"])
    names.append(f"tp=2,{chunked},{compiled}")
    names += [f"pp=2,pp_schedule={schedule},{chunked}" for schedule in SPLIT_BACKWARD]
    if processes >= 4:
        names += each(["dp_shard=2,tp=2", "pp=2,tp=2", "pp=2,dp_shard=2"], [chunked])
        names.append(f"dp_shard=2,{chunked},reshard_after_forward=always")
    return names


def dtypes() -> list[str]:
    """Layouts in lower precision; bfloat16 with dp_shard is one of `sharding_options`."""
    names = each(["tp=2", "cp=2", "pp=2"], ["training.compute_dtype=bfloat16"])
    names += each(TWO_RANKS, ["training.compute_dtype=float16"])
    for scaling in ("tensorwise", "rowwise"):
        float8 = f"float8.enabled,float8.emulate,float8.scaling={scaling}"
        # The reference computes single sequences, and the scales depend on the batch
        names.append(f"tp=2,{float8},training.local_batch_size=1")
    return names


def families(processes: int) -> list[str]:
    """Layouts with parts of other families: biases, norms of q and k, wide heads, YaRN."""
    qwen2 = "model.qkv_bias=true"
    qwen3 = "model.qk_norm=true,model.head_dim=40"
    yarn = "model.rope_scaling=yarn,model.rope_factor=4,model.rope_original_context=32"
    layouts = [*TWO_RANKS, "cp=2,cp_method=ulysses"]
    if processes >= 4:
        layouts += ["dp_shard=2,tp=2", "pp=2,tp=2"]
    names = each(layouts, [f"{qwen2},{yarn}", qwen3])
    # Muon, whose matrices have no bias; clipping by units; bfloat16
    names += each(["tp=2", "dp_shard=2"], [f"{qwen3},optimizer.name=muon,optimizer.clip=agc"])
    names += each(["tp=2", "dp_shard=2"], [f"{qwen2},training.compute_dtype=bfloat16"])
    return names


def windows(processes: int, compiler: str) -> list[str]:
    """Layouts with a sliding window, in all blocks or in some, also within documents."""
    window = "model.sliding_window=7"
    some = f"{window},model.window_layers=1-2"
    layouts = [*TWO_RANKS, "cp=2,cp_method=ulysses"]
    if processes >= 4:
        layouts += ["dp_replicate=2,dp_shard=2", "cp=4", "cp=2,tp=2", "pp=2,cp=2", "pp=2,tp=2"]
    names = each(layouts, [window, some])
    names += each(
        ["tp=2", "cp=2", "cp=2,cp_method=ulysses", "pp=2"], [f"data.document_mask,{some}"]
    )
    compiled = f"compile.enabled,compile.backend={compiler}"
    for option in (*(f"recompute.mode={mode}" for mode in RECOMPUTE_MODES[:2]), compiled):
        names += each(TWO_RANKS, [f"{option},{some}"])
    names += each(["pp=2,pp_schedule=Interleaved1F1B", "pp=2,pp_schedule=ZBVZeroBubble"], [some])
    return names


def frozen(processes: int) -> list[str]:
    """Layouts in which some parameters are not trained."""
    option = "training.frozen=tok_embeddings.* layers.1.* *.attention_norm.weight"
    layouts = ["dp_shard=2", "tp=2", "pp=2"] if processes > 1 else []
    return each(layouts, [option, f"{option},model.embeddings=untied,loss.num_chunks=3"])


def adapters(processes: int, compiler: str) -> list[str]:
    """Layouts of a frozen model with adapters (LoRA)."""
    lora = "lora.rank=4"
    everywhere = f"{lora},lora.targets=wq wk wv wo w1 w2 w3"
    if processes == 1:
        return [everywhere, f"{lora},recompute.mode=full"]
    layouts = [*TWO_RANKS, "dp_replicate=2", "cp=2,cp_method=ulysses"]
    if processes >= 4:
        layouts += ["dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "pp=2,tp=2", "cp=2,tp=2"]
    names = each(layouts, [everywhere])
    for option in ("recompute.mode=full", f"compile.enabled,compile.backend={compiler}"):
        names += each(["dp_shard=2", "tp=2", "pp=2"], [f"{option},{lora}"])
    names += each(["tp=2", "cp=2", "pp=2"], [f"data.document_mask,{lora}"])
    names += each(["dp_shard=2", "tp=2"], [f"loss.num_chunks=3,{lora}"])
    names += [
        f"tp=2,{lora},lora.rslora,model.qkv_bias=true",
        f"tp=2,{lora},model.qk_norm=true,model.head_dim=40",
        f"pp=2,pp_schedule=Interleaved1F1B,{everywhere},model.embeddings=untied",
        f"pp=2,pp_schedule=ZBVZeroBubble,{everywhere}",
        f"dp_shard=2,cpu_offload,{lora}",
        f"dp_shard=2,ema.decay=0.9,{lora}",
        f"dp_shard=2,{lora},lora.layers=1-2,optimizer.clip=agc",
        f"dp_shard=2,{lora},optimizer.name=muon",
        f"pp=2,{lora},lora.layers=0",
        f"tp=2,{everywhere},float8.enabled,float8.emulate,training.local_batch_size=1",
    ]
    return names + dropout(processes, compiler, everywhere)


def dropout(processes: int, compiler: str, lora: str) -> list[str]:
    """Layouts of adapters with dropout, whose masks are those of one process."""
    compiled = f"compile.enabled,compile.backend={compiler}"
    layouts = [
        "dp_shard=2",
        "tp=2",
        "cp=2",
        "cp=2,cp_method=ulysses,data.document_mask",
        "pp=2,recompute.mode=full",
        f"tp=2,{compiled}",
        f"dp_shard=2,recompute.mode=selective,{compiled}",
        "tp=2,float8.enabled,float8.emulate,training.local_batch_size=1",
    ]
    if processes >= 4:
        layouts.append("dp_shard=2,tp=2")
    return each(layouts, [f"{lora},lora.dropout=0.1"])


def experts(processes: int, quick: bool, compiler: str) -> list[str]:
    """Layouts of a model with experts, most of them divided over ep.

    Not in lower precision: rounding turns near ties of a router, and so a token's experts.
    """
    mixture = ",".join(f"{key}={value}" for key, value in EXPERTS.items())
    alone = "dp_shard=2,ep=2"
    if quick:
        names = [alone, "tp=2", "pp=2"]
        if processes >= 4:
            names += ["dp_shard=2,ep=2,tp=2", "dp_shard=2,cp=2,ep=4"]
        return each(names, [mixture])
    compiled = f"compile.enabled,compile.backend={compiler}"
    names = [*TWO_RANKS, "dp_replicate=2", "cp=2,ep=2", "cp=2,cp_method=ulysses,ep=2"]
    recompute = ["recompute.mode=full", "recompute.mode=selective"]
    sharding = [option for option in sharding_options(quick) if "bfloat16" not in option]
    options = [
        *sharding,
        *recompute,
        compiled,
        f"recompute.mode=memory_budget,{compiled}",
        "data.document_mask",
        "ema.decay=0.9",
        "loss.num_chunks=3",
        "loss.z_loss=1e-2",
        "optimizer.name=muon",
        "optimizer.clip=agc",
        "lora.rank=4",
        "model.embeddings=untied,model.qkv_bias=true",
        "model.qk_norm=true,model.head_dim=40",
        "model.sliding_window=7",
        "model.num_experts=8,model.experts_per_token=3",
    ]
    names += [alone, *each([alone], options)]
    names += each(["tp=2"], [*recompute, compiled, "optimizer.name=muon,optimizer.clip=agc"])
    names += each(["pp=2"], ["pp_schedule=ZBVZeroBubble", "recompute.mode=full"])
    if processes >= 4:
        names += [
            "dp_shard=4,ep=2",
            "dp_shard=4,ep=4",
            "dp_shard=2,ep=2,dp_replicate=2",
            "dp_shard=2,ep=2,dp_replicate=2,optimizer.name=muon",
            "dp_shard=2,ep=2,tp=2",
            "dp_shard=2,ep=2,tp=2,recompute.mode=full",
            "dp_shard=2,ep=2,tp=2,optimizer.name=muon,optimizer.clip=agc",
            "dp_shard=2,cp=2,ep=2",
            "dp_shard=2,cp=2,ep=4",
            "dp_shard=2,cp=2,ep=4,recompute.mode=selective",
            "cp=2,ep=2,tp=2",
            *each(
                ["dp_shard=2,ep=2,pp=2"],
                [f"pp_schedule={name}" for name in ("1F1B", "GPipe", *SPLIT_BACKWARD)],
            ),
            "cp=2,ep=2,pp=2",
        ]
    if processes >= 8:
        names += ["dp_shard=2,ep=2,tp=2,pp=2", "dp_replicate=2,dp_shard=2,cp=2,ep=4"]
    return [with_experts(name, mixture) for name in names]


def with_experts(layout: str, mixture: str) -> str:
    """Adds the keys of the mixture that the layout does not set."""
    keys = {word.partition("=")[0] for word in layout.split(",")}
    added = [word for word in mixture.split(",") if word.partition("=")[0] not in keys]
    return ",".join([layout, *added])


def documents(processes: int, quick: bool, compiler: str) -> list[str]:
    """Layouts with several documents in a sequence; the reference computes each alone."""
    masked = "data.document_mask"
    compiled = f"compile.enabled,compile.backend={compiler}"
    recompute = [f"recompute.mode={mode}" for mode in RECOMPUTE_MODES[:2]]
    names = [masked]
    if not quick:
        names += each([*recompute, f"recompute.mode=memory_budget,{compiled}"], [masked])
    if processes == 1:
        return names
    several = ["tp=2", "cp=2", "cp=2,cp_method=ulysses", "pp=2", f"dp_shard=2,{compiled}"]
    if not quick:
        axes = ["tp=2", "cp=2", "pp=2"]
        several += each(axes, [compiled])
        several += each(axes, recompute)
        several += [
            f"pp=2,pp_schedule={schedule}" for schedule in ("Interleaved1F1B", *SPLIT_BACKWARD)
        ]
    if not quick and processes >= 4:
        several += ["cp=2,tp=2", "pp=2,cp=2", "pp=2,tp=2", "dp_shard=2,cp=2,cp_method=ulysses"]
    return names + each(several, [masked])


def updates(processes: int, quick: bool) -> list[str]:
    """Layouts with another optimizer, clipping and loss."""
    muon = "optimizer.name=muon"
    agc = "optimizer.clip=agc"
    z_loss = "loss.z_loss=1e-2"
    all_three = f"{muon},{agc},{z_loss}"
    two = list(TWO_RANKS) if processes > 1 else []
    four = []
    if processes >= 4:
        four = ["dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "pp=2,tp=2"]
    if quick:
        names = ["pp=2"] if two else []
        names += four[:1]
        return each(names, [all_three])
    names = each(two + four, [muon, agc, z_loss])
    names += each(two, [f"loss.num_chunks=3,{z_loss}"])
    names += each(two + four, [f"model.embeddings=untied,{all_three}"])
    return names


def layouts(processes: int, quick: bool) -> Iterator[dict[str, int]]:
    """Yields axis -> degree for every product of at most three axes.

    The product is a power of two or divides `processes`.
    """
    most = min(processes, QUICK) if quick else processes
    sizes = [n for n in range(1, most + 1) if processes % n == 0 or n.bit_count() == 1]
    yield {}  # one process
    for size in sizes[1:]:
        for num_axes in (1, 2, 3):
            if quick and num_axes == 1 and size > 2:
                continue
            for axes in itertools.combinations(AXES, num_axes):
                for degrees in itertools.product(sizes[1:], repeat=num_axes):
                    if math.prod(degrees) == size:
                        yield dict(zip(axes, degrees, strict=True))


def reason_not_fitting(case: Case, llama: LlamaConfig) -> str:
    """The reason why a layout does not fit the model; "" if it fits."""
    try:
        check_layout(case.config, llama, case.processes)
    except ConfigError as error:
        return error.problems[0]
    return ""
