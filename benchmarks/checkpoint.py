"""Measures the cost of a checkpoint: beside a plain write, in training time, and to verify it.

    python benchmarks/checkpoint.py [--gb 1.5] [--folder PATH]

1. Saving the state of a model of that size with one process and with two, compared with a plain
write and fsync of as
   many bytes by as many processes (in the order A B B A, five times). Everything is written twice and the second write
   is measured: a virtual machine returns free memory to its host, and the first write has to allocate it again.
2. A run of `cpu_25m` (0.3 GB of state) in each mode: how long training waits for a save, and the
time of the steps.
3. Loading, and verifying before it, with the files in the page cache and without.
Takes six minutes on two cores and four times the bytes on the disk of the folder.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import step_io
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titanlite.checkpoint.folders import step_folder
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.planner import PlacementSavePlanner
from titanlite.checkpoint.retention import delete_step
from titanlite.checkpoint.step_files import verify_files

NUM_WEIGHTS = 12 * 9 + 3


def make_state(num_bytes: int) -> dict[str, dict[str, Any]]:
    """Makes weights and two moments of 12 layers, sharded over all processes as FSDP does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = num_bytes // (3 * NUM_WEIGHTS * 4 * 512) // dist.get_world_size()

    def tensor() -> DTensor:
        return DTensor.from_local(torch.randn(rows, 512), mesh, [Shard(0)])

    weights = {f"layers.{i}.weight": tensor() for i in range(NUM_WEIGHTS)}
    return {
        "model": weights,
        "optimizer": {f"{name}.{key}": tensor() for name in weights for key in ("m", "v")},
    }


def raw_write(path: Path, state: dict[str, dict[str, Any]]) -> None:
    """Writes the same bytes as one file, as fast as the disk takes them."""
    with path.open("wb", buffering=0) as file:
        for tensor in (tensor for part in state.values() for tensor in part.values()):
            file.write(tensor.to_local().reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.monotonic()
    work()
    dist.barrier()
    return time.monotonic() - started


def forget(folder: Path) -> None:
    """Drops the files from the page cache, as after a restart."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def process(rank: int, world: int, num_bytes: int, folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    state = make_state(num_bytes)
    raw: list[float] = []
    saved: list[float] = []
    steps = iter(range(1, 1000))
    planner = PlacementSavePlanner()

    def save() -> float:
        for _ in range(2):
            step = next(steps)
            seconds = timed(lambda: step_io.save(folder, step, state, planner))  # noqa: B023
            if rank == 0:
                delete_step(folder, step)
        return seconds

    def bare() -> float:
        path = folder / f"raw-{rank}"
        for _ in range(2):
            seconds = timed(lambda: raw_write(path, state))
            path.unlink()
        return seconds

    gc.disable()  # as training has it between its own collections
    for _ in range(5):
        raw.append(bare())
        saved.append(save())
        saved.append(save())
        raw.append(bare())
    results = {"raw": statistics.median(raw), "save": statistics.median(saved)}
    if world == 1:
        results |= loading(folder, state)
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def loading(folder: Path, state: dict[str, Any]) -> dict[str, float]:
    """Times verifying and loading, warm and cold, and loading what has just been verified."""
    step_io.save(folder, 1, state, PlacementSavePlanner())
    path = step_folder(folder, 1)
    manifest = read_manifest(path)
    found: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(timed(work))

    for _ in range(5):
        note("verify warm", lambda: verify_files(path, manifest))
        note("load warm", lambda: step_io.load(path, manifest, state))
        forget(path)
        note("load cold", lambda: step_io.load(path, manifest, state))
        forget(path)
        note("verify cold", lambda: verify_files(path, manifest))
        note("load after verify", lambda: step_io.load(path, manifest, state))
    delete_step(folder, 1)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def run_processes(world: int, num_bytes: int, folder: Path) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=process, args=(r, world, num_bytes, folder, answers))
        for r in range(world)
    ]
    for one in processes:
        one.start()
    result: dict[str, float] = answers.get(timeout=600)
    for one in processes:
        one.join(60)
    return result


def train(mode: str, folder: Path) -> tuple[float, float, float]:
    """Measures a run that saves often: median seconds of a save, of training's wait for it, and of
    a step.
    """
    options = [
        f"--run.folder={folder}",
        f"--run.name={mode}",
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.freq=2",
    ]
    options += [
        "--checkpoint.keep=1",
        "--training.steps=14",
        "--validation.freq=0",
        "--validation.prompts=",
    ]
    options += ["--training.global_batch_size=4", "--metrics.log_freq=1"]
    command = [sys.executable, "train.py", "cpu_25m", *options]
    done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True)
    saves = re.findall(r" GB in ([\d.]+) s, .* training waited ([\d.]+) s", done.stdout)
    if done.returncode or len(saves) != 7:
        raise SystemExit(f"{command}:\n{done.stdout}\n{done.stderr}")
    speeds = [float(tps.replace(",", "")) for tps in re.findall(r"tps ([\d,]+)", done.stdout)][2:]
    waits = [float(waited) for _, waited in saves[:-1]]  # every mode waits for the last save
    return (
        statistics.median(float(s) for s, _ in saves[:-1]),
        statistics.median(waits),
        4 * 512 / statistics.mean(speeds),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--gb", type=float, default=1.5, help="bytes of state; a 125M-parameter model has 1.5"
    )
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    num_bytes = int(options.gb * 1e9)
    body: list[str] = [f"State of {options.gb} GB.", ""]
    results: dict[str, Any] = {}
    body += [
        "| processes | bare write + fsync | save | save's speed / the disk's |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for world in (1, 2):
            found = results[f"{world} processes"] = run_processes(world, num_bytes, Path(name))
            speeds = [options.gb / found[key] for key in ("raw", "save")]
            body.append(
                f"| {world} | {speeds[0]:.2f} GB/s | {speeds[1]:.2f} GB/s | "
                f"{speeds[1] / speeds[0]:.2f} |"
            )
            print(body[-1], flush=True)
        found = results["1 processes"]
        body += ["", "| loading, one process | in the page cache | not |", "|---|---|---|"]
        body.append(f"| load alone | {found['load warm']:.3f} s | {found['load cold']:.3f} s |")
        body.append(f"| verify | {found['verify warm']:.3f} s | {found['verify cold']:.3f} s |")
        body.append(
            f"| load after verifying | {found['load warm']:.3f} s | "
            f"{found['load after verify']:.3f} s |"
        )
        body += [
            "",
            "| cpu_25m, saving every 2nd step | a save | training waits | a step |",
            "|---|---|---|---|",
        ]
        modes = ["disabled", "async", "async", "disabled"]
        runs = [(mode, train(mode, Path(name, str(i)))) for i, mode in enumerate(modes)]
        results["training"] = {f"{i} {mode}": values for i, (mode, values) in enumerate(runs)}
        for mode, (save, waited, step) in runs:
            body.append(f"| {mode} | {save:.3f} s | {waited:.4f} s | {step:.2f} s |")
    report.write("checkpoint", "What a checkpoint costs", body, results)


if __name__ == "__main__":
    main()
