"""Runs that add the same numbers in the same order give the same bits.

The losses, gradient norms, weights and moments of all runs of a class are equal in every bit. No run
is the reference and no tolerance is chosen: what one run does differently from another must not
change a number, and a fault of that part, planted in both, breaks the class.

Not equal, because a sum has another order: other numbers of local batches; the loss in chunks; tp,
cp and ep; a tied embedding over a pipeline, whose two gradients are added once per step; LoopedBFS,
whose backwards begin with the last microbatch; four ranks of data parallel, whose order is that of
gloo; in bfloat16 one process and FSDP, where only FSDP adds the rows of the embedding's gradient in
bfloat16; validation over a pipeline, which adds the losses of microbatches in fp32.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs import rows

from titanlite.config.schema import PP_SCHEDULES
from titanlite.tools.cli.main import main
from titanlite.tools.faults.catalogue import FOUND_BY
from titanlite.tools.faults.experiment import train_planted
from titanlite.tools.formats.convert import load_full_state
from titanlite.tools.verify.ladder import make_case, parse_layout

ROOT = Path(__file__).parents[2]
STOP = 2  # where a run stops whose layout contains `->`
STEPS = 4
RUN = [
    "debug",
    # Heads of 16 numbers. A block multiplies complex numbers in RoPE, and a compiled block real
    # ones. torch's kernel computes 8 complex numbers at a time (with AVX-512) and rounds as real
    # arithmetic does; what remains of a head, or a head of 8 numbers, has fused multiply-adds.
    "--model.dim=64",
    "--model.num_layers=4",
    "--model.ffn_dim=64",
    # No half of a matrix ends within one of the rows of 1,024 numbers which the norm sums in fp32
    "--model.vocab_size=4160",
    "--model.embeddings=untied",
    "--training.seq_len=64",
    "--training.global_batch_size=4",
    "--training.compute_dtype=float32",
    "--schedule.name=constant",
    "--schedule.warmup_steps=1",
    "--data.document_mask",
    "--metrics.log_freq=1",
    "--checkpoint.freq=0",
    "--validation.samples=7",
    "--validation.prompts=",
    "--compile.enabled=false",
    "--run.device=cpu",
]
TWO = "training.local_batch_size=2,validation.freq=2"
ONE = "training.local_batch_size=1,validation.freq=0"
FOUR = "training.local_batch_size=4"
EXPERTS = (
    "model.num_experts=4,model.experts_per_token=2,model.expert_ffn_dim=64,"
    "loss.router_aux_loss=0.03"
)
ASYNC = "checkpoint.freq=1,checkpoint.async_mode=async"
MEASURED = (
    "ema.decay=0.9,metrics.noise_scale_freq=1,metrics.layer_norms_freq=1,metrics.activations_freq=1"
)
IN_ORDER = [name for name in PP_SCHEDULES if name != "LoopedBFS"]


@dataclass(frozen=True)
class Class:
    """Runs with equal bits.

    A run is a layout as in `titanlite verify --layout`; after `->` it goes on in another one.
    """

    why: str
    options: str  # of all runs
    runs: tuple[str, ...]
    num_fast: int = 0  # of the runs


CLASSES = {
    "two sums": Class(
        """A gradient is the sum of two local batches: one process adds the second to the first, two
        ranks all-reduce theirs, and a + b = b + a. Recomputation repeats operators on the same
        inputs. Offloading, prefetching, resharding, saving and loading copy numbers.""",
        TWO,
        (
            "", "recompute.mode=selective", "dp_shard=2", "dp_replicate=2", f"dp_shard=2,{ASYNC}",
            "recompute.mode=full", "recompute.mode=full,recompute.offload",
            "cpu_offload", "optimizer_offload", "checkpoint.freq=1", ASYNC,
            "compile.enabled=true,compile.backend=eager",
            f"reshard_after_forward=always,{MEASURED}",
            "dp_shard=2,prefetch=2",
            "dp_shard=2,cpu_offload,prefetch=2",
            "dp_shard=2,optimizer_offload",
            "dp_shard=2,reshard_after_forward=always",
            "dp_shard=2,reshard_after_forward=never",
            "dp_shard=2,recompute.mode=selective",
            "dp_shard=2,recompute.mode=full,recompute.every=2",
            "->", "dp_shard=2 ->", "dp_replicate=2 -> dp_shard=2",
            "dp_shard=2,optimizer_offload -> dp_shard=2", f"dp_shard=2,{ASYNC} -> dp_shard=2",
        ),
        num_fast=5,
    ),
    "sums of microbatches": Class(
        """Each stage adds the gradients of microbatches in their order, as one process adds those
        of local batches, and no schedule but LoopedBFS changes this order.""",
        ONE,
        (
            "", f"pp=2,{FOUR}",
            *(f"pp=2,{FOUR},pp_schedule={schedule}" for schedule in IN_ORDER if schedule != "1F1B"),
            *(f"pp=2,{FOUR},recompute.mode={mode}" for mode in ("full", "selective")),
            f"pp=2,{FOUR},reshard_after_forward=always", f"pp=2,{FOUR},cpu_offload",
            f"pp=2,{FOUR} ->",
        ),
        num_fast=2,
    ),
    "a tied embedding over a pipeline": Class(
        "Its two gradients are added after the last microbatch.",
        f"pp=2,{FOUR},validation.freq=2,model.embeddings=tied",
        tuple(f"pp_schedule={schedule}" for schedule in IN_ORDER),
    ),
    "pipelines of two ranks": Class(
        "As above; then the sum of two ranks, sharded or not.",
        f"pp=2,{TWO}",
        (
            "dp_shard=2", "dp_replicate=2", "dp_shard=2,pp_schedule=GPipe",
            "dp_shard=2,pp_schedule=Interleaved1F1B", "dp_shard=2,reshard_after_forward=always",
        ),
    ),
    "experts": Class(
        """A local batch has the same tokens on one process and on two, so each expert computes the
        same rows. The shares that balance routers are sums of two, as gradients are.""",
        f"{TWO},{EXPERTS}",
        (
            "", "recompute.mode=full", "recompute.mode=selective", "dp_shard=2", "dp_replicate=2",
            "dp_shard=2 ->",
        ),
    ),
    "experts over a pipeline": Class(
        "A microbatch has the tokens of a local batch.",
        f"{ONE},{EXPERTS}",
        ("", f"pp=2,{FOUR}", f"pp=2,{FOUR},pp_schedule=ZBVZeroBubble"),
    ),
    "muon": Class(
        "Each matrix is gathered whole, and its update is computed as on one process.",
        f"{TWO},optimizer.name=muon",
        ("", "dp_shard=2", "dp_replicate=2", "dp_shard=2 -> dp_shard=2"),
    ),
    "bfloat16": Class(
        "Rounding is a function of the number: what is equal before is equal after it.",
        f"{TWO},training.compute_dtype=bfloat16",
        (
            "dp_shard=2", "dp_replicate=2", "dp_shard=2,recompute.mode=selective",
            "dp_shard=2,reshard_after_forward=always", "dp_shard=2,cpu_offload",
            "dp_shard=2 -> dp_replicate=2",
        ),
    ),
    "parameters in bfloat16": Class(
        "As above.",
        f"{TWO},training.param_dtype=bfloat16",
        ("dp_shard=2", "dp_replicate=2", "dp_shard=2 -> dp_shard=2"),
    ),
    "float16, with overflows": Class(
        "A scale is a power of two, and an overflow withholds the whole update.",
        f"{TWO},training.compute_dtype=float16,training.loss_scale=262144,optimizer.decayed=linear",
        ("", "optimizer_offload", "optimizer_offload ->"),
    ),
    "tp, with moments in bfloat16": Class(
        "Recomputation repeats collectives of two ranks, which have one order.",
        f"tp=2,{TWO},optimizer.state_dtype=bfloat16",
        (
            "", "recompute.mode=full", "recompute.mode=selective", "optimizer_offload",
            "optimizer_offload ->",
        ),
    ),
    "cp": Class(
        "As with tp.",
        f"cp=2,{TWO}",
        ("", "recompute.mode=full", "recompute.mode=selective", "->"),
    ),
}  # fmt: skip
# A fault that is planted in all runs breaks a class: the class, and a run that differs from the first
BROKEN_BY = {
    "rank-means": ("two sums", "dp_shard=2"),
    "gradients-averaged": ("two sums", "dp_shard=2"),
    "replicas-not-reduced": ("two sums", "dp_replicate=2"),
    "weights-by-rank": ("two sums", "dp_replicate=2"),
    "accumulation-lost": ("two sums", "dp_shard=2"),
    "replicas-in-norm": ("two sums", "dp_replicate=2"),
    "clip-by-local-norm": ("two sums", "dp_shard=2"),
    "data-begins-again": ("two sums", "->"),
    "data-counted-by-rank": ("two sums", "dp_shard=2 ->"),
    "moments-lost": ("two sums", "->"),
    "microbatch-means": ("sums of microbatches", f"pp=2,{FOUR}"),
    "divided-by-microbatches": ("sums of microbatches", f"pp=2,{FOUR}"),
    "clip-per-stage": ("sums of microbatches", f"pp=2,{FOUR}"),
    "adapters-of-rank-0": ("sums of microbatches", f"pp=2,{FOUR}"),
    "balance-per-rank": ("experts", "dp_shard=2"),
    "muon-of-shards": ("muon", "dp_shard=2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Prompts, which have no targets, and answers, all of uneven lengths."""
    folder = tmp_path_factory.mktemp("rows")
    draw = random.Random(0)
    for name, num_rows in (("train", 300), ("held_out", 40)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(num_rows):
                row = {
                    "q": "red green " * draw.randrange(1, 16),
                    "a": f"{i} " * draw.randrange(1, 25),
                }
                file.write(json.dumps(row) + "\n")
    command = ["prepare", f"{folder}/train.jsonl", "--field", "a", "--prompt-field", "q"]
    command += ["--validation", f"{folder}/held_out.jsonl", "--out", f"{folder}/data"]
    assert main(command) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def bits_of(pool, data, tmp_path_factory) -> Callable[..., dict[str, object]]:
    """Class, layout and planted fault -> the bits of this run. Each is run once."""

    @functools.cache
    def run(name: str, layout: str, fault: str = "") -> dict[str, object]:
        folder = tmp_path_factory.mktemp("run")
        parts = [part.strip() for part in layout.split("->")]
        for i, part in enumerate(parts):
            # A layout may replace an option of its class
            settings = dict(parse_layout(CLASSES[name].options)) | dict(parse_layout(part))
            steps = STEPS if i == len(parts) - 1 else STOP
            arguments = [*RUN, f"--data.path={data}", f"--run.folder={folder}"]
            arguments += [f"--{key}={value}" for key, value in settings.items()]
            arguments.append(f"--training.steps={steps}")
            text = ",".join(f"{key}={value}" for key, value in settings.items())
            processes = make_case(RUN, text, "cpu").processes
            codes = pool.run(processes, train_planted, fault, arguments, timeout=120)
            assert codes == [0] * processes
        return bits(folder / "debug")

    return run


def bits(folder: Path) -> dict[str, object]:
    """Losses and norms of all steps, and hashes of the last weights and moments."""
    found: dict[str, object] = {}
    for row in rows(folder):
        for name, value in row.items():
            if name in ("loss", "grad_norm", "router_loss") or name.endswith("/loss"):
                found[f"{name} of step {row['step']}"] = value
    state = load_full_state(folder)
    tensors = {name: state[name] for name in state}
    tensors |= {
        name: tensor.read()
        for name, tensor in state.others.items()
        if name.startswith("optimizer.")
    }
    for name, tensor in tensors.items():
        values = tensor.contiguous().flatten().view(torch.uint8).numpy()
        found[name] = hashlib.sha256(values).hexdigest()
    return found


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """The names of what differs."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


PAIRS = [
    pytest.param(
        name, layout, marks=() if i < group.num_fast else pytest.mark.slow, id=f"{name}: {layout}"
    )
    for name, group in CLASSES.items()
    for i, layout in enumerate(group.runs)
    if i > 0
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_runs_of_a_class_have_equal_bits(bits_of, name, layout):
    group = CLASSES[name]
    assert differences(bits_of(name, group.runs[0]), bits_of(name, layout)) == [], group.why


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN_BY)
def test_a_planted_fault_breaks_its_class(bits_of, fault):
    name, layout = BROKEN_BY[fault]
    first, *others = CLASSES[name].runs
    assert layout in others
    assert differences(bits_of(name, first, fault), bits_of(name, layout, fault))


def test_the_pages_have_these_numbers():
    assert FOUND_BY["bits"] == BROKEN_BY.keys()
    num_runs = sum(len(group.runs) for group in CLASSES.values())
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/parallelism.md").read_text()
    assert f"[{num_runs} runs](" in readme
    assert f"[{num_runs} runs in {len(CLASSES)} classes]" in page
    assert f" {len(BROKEN_BY)} of the [planted faults]" in page
