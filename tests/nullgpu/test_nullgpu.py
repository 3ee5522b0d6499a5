"""Runs of train.py on a GPU that computes nothing (see runtime.cpp): none may crash.

Skipped without a CUDA build of torch, as in CI, and where there is a real GPU. With one of torch's
CUDA wheels: `python -m pytest -m slow tests/nullgpu`. All layouts: `tests/nullgpu/ladder.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from counted_step import LOW_PRECISION, SMALL, Counts, measure
from pretended_gpu import build, environment, why_not

from titanlite.config.load import load_config
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.tools.plan.estimate import estimate

ROOT = Path(__file__).parents[2]
MISSING = why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("nullgpu"))


def train(
    library: Path, arguments: list[str], processes: int = 1, log: Path | None = None
) -> list[dict]:
    """The logged steps of a run."""
    command = [sys.executable, "-m", "titanlite", "train", *arguments, "--run.device=cuda"]
    variables = environment(library, processes, log=log) | {
        "NGPU": str(processes),
        "PYTHONPATH": str(ROOT),
    }
    variables["LOG_RANK"] = "0"
    folder = next(word.partition("=")[2] for word in arguments if word.startswith("--run.folder="))
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, cwd=folder, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = Path(folder).glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if "loss" in row]


WIDE = [
    "--model.dim=256",
    "--model.num_heads=8",
    "--model.num_kv_heads=2",
    "--compile.enabled=true",
]
RUNS = {
    "plain": (1, []),
    "compiled": (1, WIDE),
    "memory budget": (1, [*WIDE, "--recompute.mode=memory_budget"]),
    "memory budget, fp32": (
        1,
        [*WIDE, "--recompute.mode=memory_budget", "--training.compute_dtype=float32"],
    ),
    "offloaded": (1, ["--parallel.cpu_offload"]),
    "fsdp": (2, ["--parallel.dp_shard=2"]),
    "cp": (2, ["--parallel.cp=2"]),
    "1F1B": (2, ["--parallel.pp=2"]),
    "Interleaved1F1B": (
        2,
        ["--parallel.pp=2", "--parallel.pp_schedule=Interleaved1F1B", "--model.num_layers=4"],
    ),
    "ZBVZeroBubble": (
        2,
        ["--parallel.pp=2", "--parallel.pp_schedule=ZBVZeroBubble", "--model.num_layers=4"],
    ),
    "async tp": (2, ["--parallel.tp=2", "--parallel.async_tp", "--compile.enabled=true"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(library, arguments, name):
    processes, options = RUNS[name]
    assert [row["step"] for row in train(library, [*arguments, *options], processes)] == list(
        range(1, 7)
    )


def test_validation_checkpoints_and_resuming(library, arguments):
    saving = [
        *arguments,
        "--checkpoint.freq=1",
        "--checkpoint.async_mode=async",
        "--validation.freq=1",
    ]
    train(library, saving)
    rows = train(library, [*saving, "--training.steps=8"])
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_the_log_has_kernels_and_collectives(library, arguments, tmp_path):
    """What shows that a run is not on the CPU."""
    log = tmp_path / "log.txt"
    train(library, [*arguments, *WIDE, "--parallel.dp_shard=2"], processes=2, log=log)
    text = log.read_text()
    for found in (
        "kernel triton_",
        "product cublas",
        "nccl all-gather",
        "nccl reduce-scatter",
        "to the device",
    ):
        assert found in text, found


BLOCKS = 2  # of SMALL
LOCAL_BATCHES = 4
LINEAR_LAYERS = 7  # of a block


@pytest.mark.parametrize(
    ("options", "casts"),
    [([], 2 * LINEAR_LAYERS), (LOW_PRECISION, 0)],
    ids=["float32", "bfloat16"],
)
def test_a_step_asks_for_no_more_than_it_needs(library, options, casts):
    """Two graphs, for the blocks and the loss; no wait; three products for each linear layer. With
    fp32 weights each is cast, and its gradient cast back. The number of kernels that clip and
    update does not grow with that of tensors.
    """
    (shallow,) = measure(1, [*SMALL, *options], library)
    deeper = [*SMALL, *options, f"--model.num_layers={2 * BLOCKS}"]
    (deep,) = measure(1, deeper, library)
    assert (shallow.graphs, deep.graphs) == (2, 2)
    assert shallow.step.waits == deep.step.waits == []
    assert deep.step.copies == shallow.step.copies

    def of_a_block(field: str) -> float:
        added = getattr(deep.step, field) - getattr(shallow.step, field)
        return added / (BLOCKS * LOCAL_BATCHES)

    assert of_a_block("products") == 3 * LINEAR_LAYERS
    # 14: RMSNorm, RoPE, SwiGLU and the residual additions, forward and backward
    assert of_a_block("triton") == 14 + casts
    assert launches(deep.step, "multi_tensor_apply") <= 6  # for the norm, clipping and the update
    assert launches(deep.step, "MulFunctor") == launches(shallow.step, "MulFunctor")


def launches(step: Counts, part: str) -> int:
    """How many kernels with this in their name were launched."""
    return sum(number for name, number in step.kernels.items() if part in name)


@pytest.mark.parametrize(
    "options",
    [
        ["--parallel.dp_shard=2"],
        ["--parallel.dp_shard=2", "--parallel.reshard_after_forward=never"],
        ["--parallel.dp_replicate=2"],
    ],
    ids=" ".join,
)
def test_nccl_is_asked_for_the_planned_collectives(library, options):
    """By number, and all reductions are plain sums: a sum of products would cost a pass."""
    found = measure(2, [*SMALL, *options], library)
    config = load_config([*SMALL, *options])
    llama = resolve_flavor(config.model, 4112)
    check_layout(config, llama, 2)
    planned = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for call in estimate(config, llama, 2, "cuda").ranks[0].collectives:
        planned[call.kind.replace("_", "-")] += call.count
    for rank in found:
        assert rank.graphs == 2
        assert rank.step.waits == []
        called = dict.fromkeys(planned, 0)
        for call, number in rank.step.collectives.items():
            kind, operation = call.split(" over 2 ranks, operation ")
            called[kind] += number
            assert operation == ("none" if kind == "all-gather" else "sum")
        assert called == planned


def test_the_memory_is_that_of_the_allocator(library, arguments):
    """A run that does not fit fails as it would on a GPU, and one that fits reports what it took."""
    (*_, last) = train(library, arguments)
    assert 0 < last["memory_allocated_gib"] <= last["memory_reserved_gib"] < 1
    code = "import torch; torch.empty(3 << 30, device='cuda')"
    variables = environment(library, gib=2)
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert "OutOfMemoryError" in done.stderr


# The tests of tests/e2e/test_gpu.py that compare no numbers: the others fail here, since all numbers
# are 0.
WITHOUT_NUMBERS = [
    "test_samples_during_training",
    "test_memory_is_allocated_in_segments_that_grow",
    "test_two_deterministic_runs_are_equal_bit_for_bit",
    "test_resume_on_the_gpu",
    "test_a_step_that_is_not_logged_does_not_wait_for_the_gpu",
]


@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
def test_the_gpus_tests_without_numbers(library, name):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"tests/e2e/test_gpu.py::{name}",
    ]
    variables = environment(library, devices=1) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, cwd=ROOT, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout
