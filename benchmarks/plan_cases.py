"""Published measurements of other trainers as configs of ours, for `plan_rows.py`.

A row of the file has the columns source, hardware, gpus, model, seq, precision, layout, ac,
tok_s_per_gpu, mfu, memory_gb, notes. It becomes a case if its model is a dense one like Llama or
GPT (as a Llama with as many parameters in its feed-forward), its GPU is in the table of machines,
and its layout is stated. What is known of a trainer, and differs from ours, stands here beside its
source. Our own measurements on an H200 are cases too.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.model.flops import flops_per_token
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.counts import Memory, StepCounts
from titanlite.tools.plan.estimate import estimate, layout_of
from titanlite.tools.plan.estimate_compute import ORDER
from titanlite.tools.plan.estimate_memory import (
    CONTEXT_BYTES,
    block_activations,
    hidden_bytes,
    moments,
    range_fits,
    receive_buffers,
    reserved_bytes,
    sharded_gradients,
)
from titanlite.tools.plan.layout import Layout, Stage
from titanlite.tools.plan.machines import MACHINES, Machine
from titanlite.tools.plan.step_time import (
    FASTEST,
    MEMORY,
    SHARED,
    Rates,
    Shared,
    Work,
    attention_part,
    timed,
    work_of,
)

GIB = 2**30
RESULTS = Path(__file__).parent / "results"
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
    "dgx-gb300": "GB300-NVL72",
    "b200": "B200",
    "dgx-b200": "B200",
    "a100_40gb": "A100-40GB",
    "a100": "A100-80GB",
    "a10g": "A10G",
    "rtx a6000": "A6000",
    "a6000": "A6000",
}


# Part of a row's source or layout -> attention kernel
KERNELS = {
    "vTrain": "unfused",  # Megatron-DeepSpeed of 2022
    "llm-foundry": "triton",  # scripts/train/benchmarking/submit_benchmarks.py: the default
    "attn FA2": "flash2",
    "pytorch/torchtitan": "flash2",  # scaled_dot_product_attention before torch 2.10
}
# distributed/tensor_parallel.py wraps each projection by itself: its tp gathers the inputs of wq, wk,
# wv, w1 and w3 one by one, which with full recomputation is 20 in place of 11 collectives per block
TP_OF_KEMPNER = 20 / 11
NVIDIA = ("Megatron-Bridge", "nemo-framework")


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
    def trainer(self) -> str:
        return self.row["source"].split()[0].split("/")[-1]

    @property
    def measured(self) -> float:
        """Tokens per second of a GPU."""
        return float(self.row["tok_s_per_gpu"])

    @property
    def kernel(self) -> str:
        """The attention kernel, which the row or its trainer's repository names."""
        for text, kernel in KERNELS.items():
            if text in self.row["source"] + self.row["layout"]:
                return kernel
        return FASTEST

    @functools.cached_property
    def work(self) -> Work:
        """The work of a step, with what this trainer does in another way than ours."""
        work = work_of(self.counts, self.machine, self.config, self.llama)
        if self.kernel == "unfused":
            # Two products of all pairs, and a matrix of scores that goes through the memory
            work = replace(
                work,
                products=work.products + 2 * work.attention,
                attention=0.0,
                pointwise=work.pointwise + self._score_seconds,
            )
        if self.trainer == "KempnerForge":
            work = replace(
                work,
                transfer=work.transfer | {"tp": TP_OF_KEMPNER * work.transfer["tp"]},
                latency=work.latency | {"tp": TP_OF_KEMPNER * work.latency["tp"]},
            )
        # training/comm_overlap.py: overlap_p2p_comm with several stages per rank
        if self.trainer in NVIDIA:
            work = replace(
                work,
                transfer=work.transfer | {"pp": 0.0},
                latency=work.latency | {"pp": 0.0},
            )
        return work

    @property
    def _score_seconds(self) -> float:
        """The time to read and write scores of S^2 for each head in float16.

        By kernel: in the forward QK^T writes, the softmax reads and writes, dropout reads and
        writes, and a mask of one byte, PV reads: 6.5 times. In the backward the products read and
        write 4 times, dropout 2.5 and the softmax 3. `full` repeats the forward.
        """
        training = self.config.training
        forward = 6.5
        passes = forward + 9.5
        if self.config.recompute.mode == "full":
            passes += forward
        degrees = self.counts.degrees
        heads = self.llama.num_heads / degrees["tp"]
        sequences = training.local_batch_size * self.counts.local_batches
        layers = self.llama.num_layers / degrees["pp"]
        moved = passes * 2 * heads * training.seq_len**2 * sequences * layers
        return moved / (self.machine.memory_bandwidth * 1e9 * MEMORY)

    def predicted(self, rates: Rates, shared: Shared = SHARED) -> float:
        """Tokens per second of a GPU."""
        part = attention_part(self.kernel, self.machine.generation, shared)
        seconds = sum(timed(self.work, rates, part, self.config, shared).values())
        return self.counts.tokens / seconds / self.world_size

    def ratio(self, rates: Rates, shared: Shared = SHARED) -> float:
        """Divides predicted tokens per second by measured ones."""
        return self.predicted(rates, shared) / self.measured

    @property
    def mfu(self) -> float:
        """The measured fraction of the peak."""
        training = self.config.training
        flops = flops_per_token(self.llama, training.seq_len, self.config.lora)
        return self.measured * flops / (self.machine.peak_tflops * 1e12)

    @property
    def has_time(self) -> bool:
        # A power limit that is not stated makes the time meaningless
        limited = "power limited" in self.row["hardware"]
        return self.row["tok_s_per_gpu"] not in ("", "OOM") and not limited

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
        worst, gradients = self.worst
        if "KempnerForge" not in self.row["source"]:
            low, high = reserved_bytes(worst, gradients)
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
        return worst.total / GIB, reserved_bytes(worst, gradients)[1] / GIB

    @functools.cached_property
    def needs(self) -> list[tuple[Memory, int]]:
        """Computes the memory of each rank of pp at its fullest moment, and its gradients' bytes."""
        layout = layout_of(self.config, self.llama, self.world_size)
        found = []
        for rank in self.counts.ranks:
            stages = layout.stages_of(rank.pp_rank)
            changed = [
                self._as_in_trainer(moment, layout, stages, rank.pp_rank)
                for moment in moments(layout, stages, rank.pp_rank)
            ]
            fullest = max(changed, key=lambda moment: moment.total)
            found.append((fullest, sharded_gradients(rank, self.counts.degrees)))
        return found

    def _as_in_trainer(
        self, moment: Memory, layout: Layout, stages: list[Stage], pp_rank: int
    ) -> Memory:
        """The memory of a moment, with what this trainer does in another way than ours."""
        messages = receive_buffers(layout, stages, pp_rank)
        if self.is_fsdp2 and layout.pp > 1:
            # torch's stages before 2.15 have a buffer for each microbatch (pytorch#136380)
            last = layout.pp * layout.config.parallel.stages_per_process - 1
            neighbours = sum((stage.index > 0) + (stage.index < last) for stage in stages)
            of_all = round(neighbours * layout.microbatches * hidden_bytes(layout))
            return replace(moment, buffers=moment.buffers - messages + of_all)
        if self.trainer == "llm-foundry":
            # Its fused cross entropy replaces logits in bf16 by their gradient; without
            # recomputation its GELU keeps 8 numbers of each 10.7 of our feed-forward (16 of 18.7)
            activations = moment.activations
            if self.config.recompute.mode == "none":
                activations = activations * 16 * 3 // 56
            return replace(moment, logits=moment.logits // 3, activations=activations)
        if self.trainer in NVIDIA:
            # The fused cross entropy of TransformerEngine; received messages are activations;
            # weights are gathered in fp8 (training/mixed_precision.py); recipes for FSDP keep
            # activations of half of the blocks in CPU memory (perf_recipes/llama/gb200/llama3.py)
            activations = moment.activations
            if number(r"FSDP=(\d+)", self.row["layout"]) > 8:
                activations //= 2
            if layout.tp > 1:  # its backward gathers the inputs again (arXiv 2205.05198, 4.2.2)
                kept = block_activations(layout, frozenset(ORDER), repeats=False).until_backward
                inputs = 2 * layout.tokens * self.llama.dim * (1 - 1 / layout.tp)
                activations = round(activations * (1 - inputs / kept))
            return replace(
                moment,
                logits=moment.logits // 3,
                activations=activations,
                gathered=moment.gathered // (2 if self.config.float8.enabled else 1),
                buffers=moment.buffers - messages,
            )
        return moment

    @property
    def worst(self) -> tuple[Memory, int]:
        """The memory of the fullest rank and the bytes of its gradients."""
        return max(self.needs, key=lambda need: reserved_bytes(*need))

    @property
    def needed_gib(self) -> tuple[float, float]:
        """What `fits` compares with the memory of the GPU, as (least, most)."""
        low, high = reserved_bytes(*self.worst)
        return (low + CONTEXT_BYTES) / GIB, (high + CONTEXT_BYTES) / GIB

    @property
    def verdict(self) -> str:
        """Whether `fits` agrees with the row, which ran unless it states OOM."""
        found = range_fits(*reserved_bytes(*self.worst), self.machine.memory_bytes)
        if found is None:
            return "undecided"
        ran = self.row["memory_gb"] != "OOM"
        words = "fits" if found else "does not fit"
        return f"right: {words}" if found == ran else f"wrong: {words}"


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
        "loss.num_chunks": 1,
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
    elif "Automodel" in source:
        keys |= automodel(row)
    elif "vTrain" in source or "NVIDIA" in source or "nvidia" in source:
        keys |= megatron(row)
    else:
        raise NotExpressed("trainer or layout")
    if "Automodel" not in source:
        keys |= recomputation(row["ac"])
    if re.search("float8|fp8", row["precision"], re.I):
        keys["float8.enabled"] = True
    if "rowwise" in row["precision"]:
        keys["float8.scaling"] = "rowwise"
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
    # pipeline_parallel_microbatches is by default pp
    in_2025 = "2025" in row["source"] + row["notes"]  # when it came
    return {
        "parallel.cp": number(r"cp=(\d+)", layout, 1),
        "parallel.tp": number(r"tp=(\d+)", layout, 1),
        "parallel.pp": pp,
        "parallel.pp_schedule": "Interleaved1F1B" if interleaved else "1F1B",
        "parallel.pp_microbatch_size": max(1, local // pp),
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
        # scripts/train.py wraps stages as it wraps a whole model: a forward frees its weights
        "parallel.reshard_after_forward": "always" if pp > 1 else "default",
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


def automodel(row: dict[str, str]) -> dict[str, Any]:
    """Adds what examples/llm_benchmark/llama3_3/custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml
    has: activation checkpointing, FSDP2 that frees weights, and bf16 parameters.
    """
    layout = row["layout"]
    return {
        "parallel.cp": number(r"CP=(\d+)", layout, 1),
        "training.local_batch_size": number(r"LBS=(\d+)", layout, 1),
        "training.global_batch_size": number(r"GBS=(\d+)", layout, 1),
        "training.param_dtype": "bfloat16",
        "recompute.mode": "full",
        "compile.enabled": "true",
    }


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
    if pp == 1 and number(r"FSDP=(\d+)", layout) <= 1:
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
    else:
        # scripts/performance/utils/overrides.py: tp_comm_overlap; perf_recipes/_common.py:
        # grad_reduce_in_fp32 = False
        keys["parallel.async_tp"] = tp > 1
        keys["training.reduce_dtype"] = "bfloat16"
    if pp > 1 and stages > 1:
        keys |= {
            "parallel.pp_schedule": "Interleaved1F1B",
            "parallel.pp_stages_per_process": stages,
        }
    return keys


BASE_1B = ["llama3_1b", "--training.seq_len=4096", "--training.local_batch_size=2"]
BASE_1B += ["--recompute.mode=none", "--loss.num_chunks=8", "--compile.loss=false"]
BASE_3B = ["llama3_3b", *BASE_1B[1:]]
BASE_8B = ["llama3_8b", "--training.seq_len=8192", "--training.local_batch_size=1"]
BASE_8B += ["--recompute.mode=full", "--loss.num_chunks=8", "--compile.loss=false"]
LOW = ["--training.param_dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
COMPILED_LOSS = ["--compile.loss=true"]
# The cases of benchmarks/results/2026-11-26-throughput_*.json (docs/gpu.md) -> their configs
OWN = {
    "1b": BASE_1B,
    "1b, compiled loss, 2 chunks": [*BASE_1B, *COMPILED_LOSS, "--loss.num_chunks=2"],
    "1b, batch 8, compiled loss": [*BASE_1B, *COMPILED_LOSS, "--training.local_batch_size=8"],
    "1b, bfloat16 states": [*BASE_1B, *LOW],
    "1b, float8": [*BASE_1B, "--float8.enabled"],
    "3b": BASE_3B,
    "3b, float8": [*BASE_3B, "--float8.enabled"],
    "8b": BASE_8B,
    "8b, selective, batch 2": [
        *BASE_8B,
        "--recompute.mode=selective",
        "--training.local_batch_size=2",
    ],
    "8b, float8": [*BASE_8B, "--float8.enabled"],
}


def own_cases() -> list[Case]:
    """The measurements of benchmarks/throughput.py on one H200, with one local batch per step."""
    cases = []
    for path in sorted(RESULTS.glob("*-throughput_*b.json")):
        for name, found in json.loads(path.read_text())["results"].items():
            if name not in OWN:  # documents, whose mask skips pairs
                continue
            config = load_config(OWN[name])
            training = config.training
            config = replace(
                config,
                training=replace(
                    training,
                    global_batch_size=training.local_batch_size,
                    compute_dtype="bfloat16",
                ),
            )
            row = {
                "source": "titanlite",
                "hardware": "H200",
                "gpus": "1",
                "model": config.model.flavor,
                "seq": str(training.seq_len),
                "precision": "float8" if config.float8.enabled else "bf16",
                "layout": name,
                "ac": config.recompute.mode,
                "tok_s_per_gpu": str(found["tok/s"]),
                "mfu": "",
                "memory_gb": str(found["GiB"]),
                "notes": "",
            }
            llama = FLAVORS[config.model.flavor]
            cases.append(Case(row, MACHINES["H200"], llama, config, 1))
    return cases


def read_cases(rows: Path) -> tuple[list[Case], Counter[str]]:
    """The cases of a file and our own, and the reasons of the rows that are left out."""
    cases = own_cases()
    left_out: Counter[str] = Counter()
    with rows.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                cases.append(case_of(row))
            except NotExpressed as reason:
                left_out[f"{row['source'].split()[0]}: {reason}"] += 1
    return cases, left_out
