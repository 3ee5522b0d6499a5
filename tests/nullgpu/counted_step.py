"""Counts what a training step asks of the pretended GPU: kernels, waits, collectives, memory.

What it is: train.py in processes of torch.distributed.run, each with the library of pretended_gpu.py
and a separate log. A listener of the phases marks in the log where a step begins. What lies
between two marks is sorted and counted.
Why it is here: the tests beside it count with it.
What it costs: a run of four steps; with the compiler one to three minutes.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from pretended_gpu import environment

ROOT = Path(__file__).parents[2]
GIB = 2**30
STEP = 4  # which is counted: the first compiles and is logged, the second has the first moments
CAPACITY = 640.0  # GiB, so that no case runs out
# Two blocks that are wide enough to be compiled by default, and four local batches
SMALL = [
    "debug",
    "--model.dim=256",
    "--model.num_heads=8",
    "--model.num_kv_heads=2",
    "--model.num_layers=2",
    "--training.global_batch_size=8",
    "--training.local_batch_size=2",
    "--compile.enabled=true",
]
LOW_PRECISION = ["--training.param_dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
COMMON = [
    "--run.device=cuda",
    "--validation.prompts=",
    "--metrics.log_freq=1000",
    "--checkpoint.freq=0",
    "--validation.freq=0",
]


class Counts(NamedTuple):
    """One step of one process."""

    triton: int  # kernels that inductor has generated
    other: int  # kernels of torch
    products: int  # matrix products of cuBLAS
    copies: int  # between the memory of the host and that of the device
    waits: list[str]  # of the host for the device, each as it was written down
    collectives: dict[str, int]  # "all-reduce over 2 ranks, operation sum" -> number of calls
    kernels: dict[str, int]  # name -> number of launches


class Found(NamedTuple):
    """What one process of a case found."""

    step: Counts
    graphs: int
    reserved_gib: float
    allocated_gib: float


def counts(lines: list[str]) -> Counts:
    """Sorts what the library wrote down."""
    kernels: collections.Counter[str] = collections.Counter()
    collectives: collections.Counter[str] = collections.Counter()
    waits = []
    products = 0
    copies = 0
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "kernel":
            kernels[rest.rpartition(" stream ")[0]] += 1
        elif kind == "product":
            products += 1
        elif kind == "nccl" and (call := re.match(r"(\S+) of .* (\d+) ranks, (.*)", rest)):
            name, ranks, operation = call.groups()
            collectives[f"{name} over {ranks} ranks, {operation}"] += 1
        elif kind == "wait" or line.startswith("copy from the device"):
            waits.append(line)
        elif line.startswith("copy to the device"):
            copies += 1
    triton = sum(number for name, number in kernels.items() if name.startswith("triton_"))
    return Counts(
        triton=triton,
        other=kernels.total() - triton,
        products=products,
        copies=copies,
        waits=waits,
        collectives=dict(collectives),
        kernels=dict(kernels),
    )


def count_step(arguments: list[str]) -> None:
    """Trains in this process until the counted step is over, writes what was found, and exits."""
    rank = os.environ.get("RANK", "0")
    log = Path(os.environ["PRETENDED_FOLDER"], f"{rank}.log")
    os.environ["PRETENDED_LOG"] = str(log)  # the library opens it when it first writes

    import torch

    from titanlite.runtime.phases import Phase, add_listener
    from titanlite.tools.torch_private import num_compiled_graphs
    from train import run

    library = ctypes.CDLL(None)
    steps = 0

    def mark(phase: Phase) -> None:
        nonlocal steps
        if phase is not Phase.READ_DATA:
            return
        library.pretended_mark(f"step {steps}".encode())
        steps += 1
        if steps > STEP:
            _, _, after = log.read_text().partition(f"mark step {STEP - 1}\n")
            of_step, _, _ = after.partition("mark step")
            found = Found(
                counts(of_step.splitlines()),
                num_compiled_graphs(),
                torch.cuda.max_memory_reserved() / GIB,
                torch.cuda.max_memory_allocated() / GIB,
            )
            log.with_suffix(".json").write_text(json.dumps(found))
            os._exit(0)  # without the checkpoint of a run that ends

    add_listener(mark)
    raise SystemExit(run(arguments))


def measure(processes: int, arguments: list[str], library: Path) -> list[Found]:
    """What each process found in a step of a run with these arguments of train.py.

    Raises RuntimeError with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(library, processes, CAPACITY)
        variables |= {"PRETENDED_FOLDER": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", __file__]
        command += [*arguments, *COMMON, f"--run.folder={folder}"]
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, check=False, timeout=900
        )
        files = [Path(folder, f"{rank}.json") for rank in range(processes)]
        if done.returncode or not all(file.exists() for file in files):
            raise RuntimeError((done.stdout + done.stderr)[-6000:])
        found = []
        for file in files:
            step, *rest = json.loads(file.read_text())
            found.append(Found(Counts(*step), *rest))
        return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    count_step(sys.argv[1:])
