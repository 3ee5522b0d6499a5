"""Compares predictions of `titanlite plan` with published measurements of other trainers.

    python benchmarks/plan_rows.py ROWS.csv [--seed 0]

ROWS.csv has the columns source, hardware, gpus, model, seq, precision, layout, ac, tok_s_per_gpu,
mfu, memory_gb, notes. It compares rows with a dense model like Llama or GPT (as a Llama with as
many parameters in its feed-forward), a GPU of the table and a stated layout. The rates of each GPU
type are fitted on half of its rows, chosen by the seed, and judged on the other half.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import random
import re
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import StepCounts
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.estimate_memory import fits, reserved_bytes
from titanlite.tools.plan.machines import MACHINES, Machine
from titanlite.tools.plan.step_time import Rates, step_time

GIB = 2**30
LLAMA2 = FLAVORS["llama2_7b"]
LLAMA2_13B = replace(LLAMA2, dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, ffn_dim=13824)
LLAMA2_70B = replace(FLAVORS["llama3_70b"], vocab_size=32000)
QWEN3_4B = replace(
    FLAVORS["qwen3_8b"],
    dim=2560,
    ffn_dim=9728,
    tied_embeddings=True,
    explicit_head_dim=128,
)
# Beginning of the row's model, in lower case -> its shape
MODELS: dict[str, LlamaConfig] = {
    "llama-3.1-8b": FLAVORS["llama3_8b"],
    "llama-3-8b": FLAVORS["llama3_8b"],
    "llama3 8b": FLAVORS["llama3_8b"],
    "llama3_8b": FLAVORS["llama3_8b"],
    "llama-3 8.0": FLAVORS["llama3_8b"],
    "llama-3.1-70b": FLAVORS["llama3_70b"],
    "llama-3-70b": FLAVORS["llama3_70b"],
    "llama3 70b": FLAVORS["llama3_70b"],
    "llama3_70b": FLAVORS["llama3_70b"],
    "llama3-70b": FLAVORS["llama3_70b"],
    "llama-3 70.6b": FLAVORS["llama3_70b"],
    "llama-3.1-405b": FLAVORS["llama3_405b"],
    "llama3.1_405b": FLAVORS["llama3_405b"],
    "llama-2-13b": LLAMA2_13B,
    "llama2-13b": LLAMA2_13B,
    "llama-2-70b": LLAMA2_70B,
    "llama2-70b": LLAMA2_70B,
    "llama2-7b": LLAMA2,
    "llama-2-7b": LLAMA2,
    "llama-3.2-1b": FLAVORS["llama3_1b"],
    "llama-3.2-3b": FLAVORS["llama3_3b"],
    "mistral-7b": FLAVORS["mistral_7b"],
    "smollm3-3b": LlamaConfig(2048, 36, 16, 4, 11008, tied_embeddings=True),
    "qwen3-4b": QWEN3_4B,
    "qwen3-0.6b": FLAVORS["qwen3_0.6b"],
}
# llm-foundry's MPT: width, layers, heads
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
# Beginning of the row's hardware -> machine
HARDWARE = {
    "h100 96gb": "H100-96GB-500W",
    "h100": "H100",
    "dgx-h100": "H100",
    "h200": "H200",
    "dgx-gb200": "GB200-NVL72",
    "b200": "B200",
    "dgx-b200": "B200",
    "a100_40gb": "A100-40GB",
    "a100": "A100-80GB",
    "a10g": "A10G",
    "rtx a6000": "A6000",
    "a6000": "A6000",
}


class NotExpressed(Exception):
    """The reason why a row is not compared."""


@dataclass(frozen=True)
class Case:
    """A row as a config of ours."""

    row: dict[str, str]
    machine: Machine
    llama: LlamaConfig
    config: Config
    world_size: int

    @functools.cached_property
    def counts(self) -> StepCounts:
        return estimate(self.config, self.llama, self.world_size)

    @property
    def is_fsdp2(self) -> bool:
        """Whether the trainer shards as we do, with dtypes that are known."""
        source = self.row["source"]
        return any(name in source for name in ("torchtitan", "KempnerForge", "fsdp2/blog"))

    @property
    def name(self) -> str:
        row = self.row
        source = row["source"].split()[0].split("/")[-1]
        return f"{source}, {row['gpus']} {self.machine.name}, {row['model'][:16]}, {row['seq']}"

    @property
    def memory_gib(self) -> tuple[float, float]:
        """Predicts the number that the row states, as (least, most)."""
        worst = max((rank.memory for rank in self.counts.ranks), key=lambda memory: memory.total)
        if "KempnerForge" not in self.row["source"]:
            low, high = reserved_bytes(worst)
            return low / GIB, high / GIB
        # It states max_memory_allocated (metrics/memory.py). Its loss is computed in bf16, of the
        # whole vocabulary on each rank of tp (training/loss.py, distributed/tensor_parallel.py)
        if self.counts.degrees["pp"] > 1:  # without sequence parallel
            worst = replace(worst, activations=worst.activations * self.counts.degrees["tp"])
        if worst.logits:
            training = self.config.training
            tokens = training.local_batch_size * training.seq_len
            if self.counts.degrees["pp"] > 1:
                tokens = training.seq_len
            worst = replace(worst, logits=8 * tokens * self.llama.vocab_size)
        return worst.total / GIB, worst.total / GIB

    @property
    def verdict(self) -> str:
        """Whether `fits` agrees with the row, which ran unless it states OOM."""
        worst = max((rank.memory for rank in self.counts.ranks), key=lambda memory: memory.total)
        found = fits(worst, self.machine.memory_bytes)
        if found is None:
            return "undecided"
        ran = self.row["memory_gb"] != "OOM"
        words = "fits" if found else "does not fit"
        return f"right: {words}" if found == ran else f"WRONG: {words}"

    def seconds_error(self, rates: Rates) -> float:
        """Divides predicted tokens per second by measured ones."""
        predicted = step_time(self.counts, self.machine, self.config, self.llama, rates)
        return predicted.tokens_per_second / float(self.row["tok_s_per_gpu"])


def number(pattern: str, text: str, default: int = 0) -> int:
    """Reads the number behind a name, as in TP=4."""
    found = re.search(pattern, text, re.I)
    return int(found[1]) if found else default


def model_of(row: dict[str, str]) -> LlamaConfig:
    name = row["model"].lower()
    for start, llama in MODELS.items():
        if name.startswith(start):
            return llama
    if name.startswith("mpt"):
        dim, layers, heads = MPT[name.split()[1]]
        return LlamaConfig(dim, layers, heads, heads, hidden(dim), 50368, tied_embeddings=True)
    gpt = re.search(r"h=(\d+) l=(\d+) a=(\d+)", name)
    if gpt:
        dim, layers, heads = (int(text) for text in gpt.groups())
        return LlamaConfig(dim, layers, heads, heads, hidden(dim), 51200, tied_embeddings=True)
    if name.startswith("llama-3 14.84b"):  # KempnerForge's 13b: 40 layers of 5120
        return LlamaConfig(5120, 40, 40, 8, 17920)
    if name.startswith("llama-3 28.7b"):
        return LlamaConfig(6144, 56, 48, 8, 21504)
    raise NotExpressed("model")


def hidden(dim: int) -> int:
    """Computes the width of a SwiGLU with as many parameters as two matrices of 4 dim."""
    return 8 * dim // 3 // 128 * 128


def machine_of(row: dict[str, str]) -> Machine:
    hardware = row["hardware"].lower()
    for start, name in HARDWARE.items():
        if hardware.startswith(start):
            machine = MACHINES[name]
            per_node = number(r"(\d+)/node", hardware)
            if per_node:
                machine = replace(machine, gpus_per_node=per_node)
            return machine
    raise NotExpressed("GPU not in the table")


def case_of(row: dict[str, str]) -> Case:
    """Converts a row to a config. Raises NotExpressed."""
    machine = machine_of(row)
    llama = model_of(row)
    source = row["source"]
    keys: dict[str, Any] = {
        "training.seq_len": number(r"(\d+)", row["seq"]),
        "training.compute_dtype": "bfloat16",
        "compile.loss": "false",
    }
    if not keys["training.seq_len"] or "?" in row["seq"]:
        raise NotExpressed("length of sequences")
    if "torchtitan" in source:
        keys |= torchtitan(row)
    elif "KempnerForge" in source:
        keys |= kempner(row)
    elif "fsdp2/blog" in source:
        never = "False" in row["layout"]
        keys |= {
            "training.local_batch_size": 1,
            "parallel.reshard_after_forward": "never" if never else "default",
            "compile.enabled": "false",
        }
    elif "prime-rl" in source and "SFT Full" in row["layout"]:
        keys["training.local_batch_size"] = 1
    elif "litgpt" in source and "yaml" in row["layout"]:
        keys |= litgpt(row)
    elif "llm-foundry" in source:
        keys |= foundry(row)
    elif "vTrain" in source or "NVIDIA" in source or "nvidia" in source:
        keys |= megatron(row)
    else:
        raise NotExpressed("trainer or layout")
    keys |= recomputation(row["ac"])
    if re.search("float8|fp8", row["precision"], re.I):
        keys["float8.enabled"] = True
    kind = row["layout"] + row["notes"]
    if re.search(r"LoRA|SFT|Tuning", kind) and not re.search("prime-rl|litgpt", source):
        raise NotExpressed("fine-tuning")
    if any(word in row["precision"] for word in ("fp32", "NVFP4", "fp8_", "MXFP8")):
        raise NotExpressed(f"precision {row['precision']}")
    world_size = int(row["gpus"])
    config = with_batch(keys, world_size)
    case = Case(row, machine, llama, config, world_size)
    try:
        assert case.counts
    except (ConfigError, ValueError) as error:
        raise NotExpressed(f"not allowed: {str(error)[:90]}") from None
    return case


def with_batch(keys: dict[str, Any], world_size: int) -> Config:
    """Builds the config of these keys; the default global batch is one local batch per rank."""
    model_ranks = math.prod(keys.get(f"parallel.{axis}", 1) for axis in ("pp", "cp", "tp"))
    data_ranks = world_size // model_ranks
    keys.setdefault(
        "training.global_batch_size", keys.get("training.local_batch_size", 1) * data_ranks
    )
    config = load_config(["debug"])
    for name, value in keys.items():
        section, field = name.split(".")
        changed = replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def recomputation(text: str) -> dict[str, Any]:
    if text.startswith("selective layer"):
        return {"recompute.mode": "full", "recompute.every": 2}
    for mode in ("full", "selective", "none"):
        if text.startswith(mode):
            return {"recompute.mode": mode}
    return {"recompute.mode": "none"}


def torchtitan(row: dict[str, str]) -> dict[str, Any]:
    layout = row["layout"]
    if "ep=" in layout:
        raise NotExpressed("experts")
    pp = number(r"pp=(\d+)", layout, 1)
    local = number(r"local batch (\d+)", layout, 1)
    compiled = "compile" in row["notes"] or "async" in layout or "float8" in row["precision"]
    interleaved = "Interleaved" in layout
    # Its number of microbatches is its number of stages
    stages = pp * (2 if interleaved else 1)
    in_2025 = "2025" in row["source"] + row["notes"]  # when it came
    return {
        "parallel.cp": number(r"cp=(\d+)", layout, 1),
        "parallel.tp": number(r"tp=(\d+)", layout, 1),
        "parallel.pp": pp,
        "parallel.pp_schedule": "Interleaved1F1B" if interleaved else "1F1B",
        "parallel.pp_microbatch_size": max(1, local // stages),
        "parallel.async_tp": "async" in layout or "async" in row["precision"],
        "training.local_batch_size": local,
        "compile.enabled": "true" if compiled else "false",
        "compile.loss": "true" if compiled and in_2025 else "false",
    }


def kempner(row: dict[str, str]) -> dict[str, Any]:
    layout = row["layout"]
    if "MoE" in row["model"]:
        raise NotExpressed("experts")
    world_size = int(row["gpus"])
    tp = number(r"TP=(\d+)", layout, 1)
    pp = number(r"PP=(\d+)", layout, 1)
    step = float((re.search(r"step ([\d.]+)", row["notes"]) or ["", "0"])[1])
    total = float(row["tok_s_per_gpu"]) * world_size * step / int(row["seq"])
    data = world_size // tp // pp
    accumulation = number(r"accum (\d+)", layout, 1)
    local = number(r"batch (\d+)", layout) or max(1, round(total / data))
    if pp == 1 and "accum" not in layout:  # configs/train/7b_32gpu_fsdp.toml, 70b_32gpu_tp4.toml
        total = local
        local = 2 if tp == 4 else 4
        accumulation = total // local
    return {
        "parallel.tp": tp,
        "parallel.pp": pp,
        "training.local_batch_size": local,
        "training.global_batch_size": local * accumulation * data,
        "training.param_dtype": "bfloat16",
        "optimizer.state_dtype": "bfloat16",
        "parallel.reduce_every_microbatch": pp > 1,
        "compile.enabled": "true" if pp == 1 else "false",
    }


def foundry(row: dict[str, str]) -> dict[str, Any]:
    layout = row["layout"]
    return {
        "training.local_batch_size": number(r"microbatch (\d+)", layout, 1),
        "training.global_batch_size": number(r"GBS (\d+)", layout, 1),
        "training.reduce_dtype": "bfloat16" if "PURE" in row["notes"] else "float32",
        "parallel.reshard_after_forward": "never" if "GRAD_OP" in layout else "always",
        "compile.enabled": "false",
    }


def litgpt(row: dict[str, str]) -> dict[str, Any]:
    """Adds litgpt's settings: bf16 parameters and moments; full.yaml shards and recomputes on
    several GPUs, lora.yaml runs on one.
    """
    layout = row["layout"]
    if "qlora" in layout:
        raise NotExpressed("quantized weights")
    keys: dict[str, Any] = {
        "training.local_batch_size": number(r"microbatch (\d+)", layout, 1),
        "training.param_dtype": "bfloat16",
        "training.reduce_dtype": "bfloat16",
        "optimizer.state_dtype": "bfloat16",
        "compile.enabled": "false",
    }
    if "lora" in layout:
        if row["gpus"] != "1":
            raise NotExpressed("adapters on several GPUs, not stated how")
        keys |= {"lora.rank": 32, "lora.targets": "wq, wv"}
    return keys


def megatron(row: dict[str, str]) -> dict[str, Any]:
    """Adds Megatron's: its optimizer gathers weights and reduces gradients once per step."""
    layout = row["layout"]
    tp = number(r"\bTP=(\d+)", layout, 1)
    pp = number(r"\bPP=(\d+)", layout, 1)
    cp = number(r"\bCP=(\d+)", layout, 1)
    stages = number(r"\bVP=(\d+)", layout, 1)
    batch = number(r"GBS=(\d+)", layout, 1)
    micro = number(r"MBS=(\d+)", layout, 1)
    data = int(row["gpus"]) // tp // pp // cp
    keys: dict[str, Any] = {
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.cp": cp,
        "parallel.pp_microbatch_size": micro,
        "training.local_batch_size": batch // data if pp > 1 else micro,
        "training.global_batch_size": batch,
        "compile.enabled": "true",
    }
    if pp == 1:
        keys |= {
            "parallel.reshard_after_forward": "never",
            "parallel.reduce_every_microbatch": False,
        }
    if "vTrain" in row["source"]:
        keys |= {
            "parallel.dp_replicate": data,
            "parallel.dp_shard": 1,
            "compile.enabled": "false",
        }
    if pp > 1 and stages > 1:
        keys |= {
            "parallel.pp_schedule": "Interleaved1F1B",
            "parallel.pp_stages_per_process": stages,
        }
    return keys


GRID = tuple(0.05 * step for step in range(3, 19))  # 0.15 to 0.9 of a peak
PRIOR = 0.3
HOST_GRID = tuple(0.2 * step for step in range(2, 21))  # 0.4 to 4 ms


def fitted(cases: list[Case]) -> Rates:
    """Fits one rate after the other, by the smallest sum of |log(predicted / measured)|.

    A rate leaves its default only for a clear gain: few rows do not tell four rates apart.
    """
    rates = Rates()

    def loss(candidate: Rates) -> float:
        total = sum(abs(math.log(case.seconds_error(candidate))) for case in cases)
        for field in dataclasses.fields(Rates):
            default = getattr(Rates(), field.name)
            total += PRIOR * abs(math.log(getattr(candidate, field.name) / default))
        return total

    for _ in range(4):
        for name in ("products", "host_ms", "links", "attention"):
            values = HOST_GRID if name == "host_ms" else GRID
            rates = min((replace(rates, **{name: value}) for value in values), key=loss)
    return rates


def compare_times(cases: list[Case], seed: int) -> None:
    timed = []
    for case in cases:
        # A power limit that is not stated makes the time meaningless
        limited = "power limited" in case.row["hardware"]
        if case.row["tok_s_per_gpu"] not in ("", "OOM") and not limited:
            timed.append(case)
    by_type: dict[str, list[Case]] = {}
    for case in timed:
        by_type.setdefault(case.machine.name, []).append(case)
    print("\n## Time\n")
    print(
        "| GPU | rows | products, attention, links, host ms | median error, fitted half | other |"
    )
    print("|---|---|---|---|---|")
    errors = []
    misses = []
    for name, of_type in by_type.items():
        shuffled = list(of_type)
        random.Random(seed).shuffle(shuffled)
        half = (len(shuffled) + 1) // 2
        rates = fitted(shuffled[:half])
        judged = shuffled[half:]
        found = [abs(case.seconds_error(rates) - 1) for case in judged]
        errors += found
        misses += [
            (case.seconds_error(rates), case) for case in judged if case.seconds_error(rates)
        ]
        inside = statistics.median(abs(case.seconds_error(rates) - 1) for case in shuffled[:half])
        other = f"{statistics.median(found):.1%} of {len(found)}" if found else "none left"
        values = (rates.products, rates.attention, rates.links, rates.host_ms)
        shown = ", ".join(f"{value:.2f}" for value in values)
        print(f"| {name} | {len(of_type)} | {shown} | {inside:.1%} | {other} |")
    print(f"\nMedian error on the judged half, all types: {statistics.median(errors):.1%}.\n")
    print("By trainer, judged half: median of predicted / measured tokens per second, and error.\n")
    by_source: dict[str, list[float]] = {}
    for ratio, case in misses:
        by_source.setdefault(case.row["source"].split()[0], []).append(ratio)
    for source, ratios in by_source.items():
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        print(f"- {source}: {statistics.median(ratios):.2f}, {error:.1%} of {len(ratios)}")
    print("\nThe largest misses of the judged half:\n")
    print("| row | layout | predicted / measured |")
    print("|---|---|---|")
    misses.sort(key=lambda miss: -abs(math.log(miss[0])))
    for ratio, case in misses[:15]:
        print(f"| {case.name} | {case.row['layout'][:60]} | {ratio:.2f} |")


def compare_memory(cases: list[Case]) -> None:
    print("## Memory\n")
    print("FSDP2, with dtypes that are known: GiB.\n")
    print("| row | layout | measured | predicted, at most | error | verdict |")
    print("|---|---|---|---|---|---|")
    good = 0
    stated = [case for case in cases if case.row["memory_gb"]]
    sharded = [case for case in stated if case.is_fsdp2]
    for case in sharded:
        measured = float(case.row["memory_gb"])
        low, high = case.memory_gib
        error = (low + high) / 2 / measured - 1
        good += abs(error) <= 0.1
        print(
            f"| {case.name} | {case.row['layout'][:44]} {case.row['ac']} | {measured:.1f} | "
            f"{low:.1f} to {high:.1f} | {error:+.1%} | {case.verdict} |"
        )
    print(f"\nWithin 10 %: {good} of {len(sharded)}.\n")
    print("Others, of which the verdict counts:\n")
    print("| row | layout | measured | predicted, at most | verdict |")
    print("|---|---|---|---|---|")
    for case in stated:
        if case not in sharded:
            low, high = case.memory_gib
            print(
                f"| {case.name} | {case.row['layout'][:44]} {case.row['ac']} | "
                f"{case.row['memory_gb']} | {low:.1f} to {high:.1f} | {case.verdict} |"
            )
    verdicts = Counter(case.verdict.split(":")[0] for case in stated)
    print("\nVerdicts: " + ", ".join(f"{name} {count}" for name, count in verdicts.items()) + ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases = []
    left_out: Counter[str] = Counter()
    with arguments.rows.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                cases.append(case_of(row))
            except NotExpressed as reason:
                left_out[f"{row['source'].split()[0]}: {reason}"] += 1
    print(f"{len(cases)} rows are expressed, {sum(left_out.values())} are not.\n")
    compare_memory(cases)
    compare_times(cases, arguments.seed)
    print("\n## Rows that are not expressed\n")
    for text, count in left_out.most_common():
        print(f"- {count}: {text}")


if __name__ == "__main__":
    main()
