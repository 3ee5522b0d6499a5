"""Checks what must work on a machine before measuring: training, saving, stopping and resuming.

    python benchmarks/first_checks.py [--device cuda]

The checks run one after the other, each in separate processes: the versions of what torch uses; a
run by `python train.py` that saves in the background and is stopped by SIGTERM; its continuation
under torchrun; a run by `./run_train.sh` on all GPUs (on one, if their number is not a power of
two); a run with compiled blocks and loss; one with masked documents. The results are written after each check, with the end of the output of one that fails.
Takes half a minute on two CPU cores (`--device cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

LIMIT = 120  # seconds for one process
OPTIONS = [
    "debug",
    "--training.steps=60",
    "--validation.prompts=",
    "--metrics.log_freq=1",
    "--validation.freq=30",
]
SAVES = ["--checkpoint.freq=20", "--checkpoint.async_mode=async"]
VERSIONS = """
import json, torch
found = {"torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
if torch.cuda.is_available():
    found |= {"NCCL": torch.cuda.nccl.version(), "devices": torch.cuda.device_count()}
    found |= {"compute capability": torch.cuda.get_device_capability()}
try:
    import triton
    found["Triton"] = triton.__version__
except ImportError:
    found["Triton"] = None
print(json.dumps(found))
"""


def run(command: list[str], expected: int = 0, **environment: str) -> str:
    """Runs a command.

    Raises RuntimeError with the end of its output if its exit code is another.
    """
    done = subprocess.run(
        command,
        cwd=report.ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode != expected:
        raise RuntimeError(
            f"exit code {done.returncode}, expected {expected}\n{done.stdout[-report.OUTPUT_KEPT :]}"
        )
    return done.stdout


def versions(folder: Path, device: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([sys.executable, "-c", VERSIONS]).splitlines()[-1])
    for name, command in (("gcc", ["gcc", "--version"]), ("driver", ["nvidia-smi", "-L"])):
        found[name] = run(command).splitlines()[0] if shutil.which(command[0]) else None
    return found


def stopped(folder: Path, device: str) -> dict[str, Any]:
    """Runs `python train.py` and stops it by SIGTERM after step 10: it must exit with code 75 and
    leave checkpoints.
    """
    log = (folder / "output.txt").open("w+")
    command = [
        sys.executable,
        "train.py",
        *OPTIONS,
        *SAVES,
        f"--run.device={device}",
        f"--run.folder={folder}",
    ]
    process = subprocess.Popen(command, cwd=report.ROOT, stdout=log, stderr=subprocess.STDOUT)
    metrics, deadline = folder / "debug/metrics.jsonl", time.monotonic() + LIMIT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and '"step": 10,' in metrics.read_text():
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        code = process.wait(LIMIT)
    finally:
        process.kill()
    if code != 75:
        raise RuntimeError(
            f"exit code {code}, expected 75\n{Path(log.name).read_text()[-report.OUTPUT_KEPT :]}"
        )
    return {
        "checkpoints": sorted(path.name for path in (folder / "debug/checkpoints").glob("step-*"))
    }


def resumed(folder: Path, device: str) -> dict[str, Any]:
    """Continues the same run to its end, under torchrun with one process."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "train.py",
    ]
    output = run([*launcher, *OPTIONS, *SAVES, f"--run.device={device}", f"--run.folder={folder}"])
    if "resumed from" not in output:
        raise RuntimeError(f"it did not resume\n{output[-report.OUTPUT_KEPT :]}")
    rows = [json.loads(line) for line in (folder / "debug/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    if sorted(losses) != list(range(1, 61)) or losses[60] > losses[1] - 0.5:
        raise RuntimeError(f"losses by step: {losses}")
    return {"first loss": losses[1], "last loss": losses[60]}


def all_devices(folder: Path, device: str) -> dict[str, Any]:
    """Runs `./run_train.sh` on all GPUs if their number is a power of two, otherwise on one; on a
    CPU with two processes.
    """
    count = len(report.gpus()) if device == "cuda" else 2
    if count & (count - 1):
        count = 1  # the batch of the debug config is a power of two
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = [f"--run.device={device}", f"--run.folder={folder}", "--run.name=all"]
    run(["./run_train.sh", *OPTIONS, *options, "--training.steps=40"], NGPU=str(count), PATH=path)
    return {"processes": count}


def trained(folder: Path, device: str, name: str, *options: str) -> dict[str, Any]:
    """Runs `python train.py`; returns its first and last loss."""
    where = [f"--run.device={device}", f"--run.folder={folder}", f"--run.name={name}"]
    run([sys.executable, "train.py", *OPTIONS, "--training.steps=40", *where, *options])
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    if losses[-1] > losses[0] - 0.5:
        raise RuntimeError(f"nothing was learnt: losses {losses}")
    return {"first loss": losses[0], "last loss": losses[-1]}


def compiled(folder: Path, device: str) -> dict[str, Any]:
    return trained(folder, device, "compiled", "--compile.enabled", "--compile.loss")


def documents(folder: Path, device: str) -> dict[str, Any]:
    return trained(folder, device, "documents", "--data.document_mask", "--model.dim=64")


CHECKS: list[Callable[[Path, str], dict[str, Any]]] = [
    versions,
    stopped,
    resumed,
    all_devices,
    compiled,
    documents,
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    body, results = ["| check | seconds | result |", "|---|---|---|"], {}
    with tempfile.TemporaryDirectory() as folder:
        for check in CHECKS:
            started = time.monotonic()
            try:
                results[check.__name__] = found = check(Path(folder), device)
                result = ", ".join(f"{name} {value}" for name, value in found.items())
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                # A time-out's output; other errors have it in their message
                output = getattr(error, "output", None) or b""
                error = RuntimeError(
                    f"{error}\n{output[-report.OUTPUT_KEPT :]!r}" if output else str(error)
                )
                results[check.__name__] = {"failed": str(error)}
                result = f"FAILED: {str(error).splitlines()[0]}"
                print(error, file=sys.stderr)
            body.append(f"| {check.__name__} | {time.monotonic() - started:.0f} | {result} |")
            print(body[-1], flush=True)
            report.write("first_checks", "First checks", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
