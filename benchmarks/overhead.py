"""Measures the overhead of train.py, and of FSDP2 on one process, over a plain training loop.

    python benchmarks/overhead.py [--steps 8] [--rounds 3] [-- CONFIG --section.key=value ...]

Runs three processes in rounds in the order A B C C B A: train.py itself (data, clipping, metrics,
signals, watchdog), a plain loop around the same model on text, and the same loop with `fully_shard`
around each block and the model. Each runs `--steps` steps after two that are not measured. Each
round compares the medians of its steps. The result is the median over the rounds, with their range,
because single rounds vary on a shared machine. The default is 25 million parameters and 2,048
tokens per step. Takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

DEFAULT = ["cpu_25m", "--training.local_batch_size=4", "--training.global_batch_size=4"]
DEFAULT += ["--training.compute_dtype=float32", "--compile.enabled=false"]  # as the bare loop does
ALONE = [
    "--checkpoint.freq=0",
    "--validation.freq=0",
    "--metrics.log_freq=1",
    "--validation.prompts=",
]
UNCOUNTED = 2
BARE = """
import json, sys, time
sys.path.insert(0, "benchmarks")
import torch
from contestants import Bare, configuration, make_batch, timed
from titanlite.distributed import process_group
arguments, steps, sharded = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fsdp"
config, _ = configuration(arguments)
device = process_group.start(config.run, config.comm, config.debug)
bare = Bare(arguments, device)
if sharded:
    bare.shard()
batches = [make_batch(config, device, number) for number in range(steps)]
print(json.dumps(timed(bare.step, batches, device)))
"""
KINDS = {"train.py": "", "bare loop": "plain", "bare loop with fully_shard": "fsdp"}


def measure(kind: str, arguments: list[str], steps: int, folder: Path) -> list[float]:
    """Runs one process; returns the seconds of its counted steps."""
    environment = os.environ | {"PYTHONPATH": str(report.ROOT)}
    run = tempfile.mkdtemp(dir=folder)
    own = [f"--run.folder={run}", "--run.name=run", f"--training.steps={steps}", *ALONE]
    bare = ["-c", BARE, json.dumps(arguments), str(steps), KINDS[kind]]
    command = [sys.executable, *(bare if KINDS[kind] else ["train.py", *arguments, *own])]
    done = subprocess.run(
        command, cwd=report.ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        # The output has the reason
        raise SystemExit(f"{kind} ended with exit code {done.returncode}")
    if KINDS[kind]:
        return json.loads(done.stdout.splitlines()[-1])[UNCOUNTED:]
    seconds = [
        json.loads(line)["seconds"]
        for line in Path(run, "run/metrics.jsonl").read_text().splitlines()
    ]
    return [b - a for a, b in zip([0.0, *seconds], seconds, strict=False)][UNCOUNTED:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("arguments", nargs="*", default=DEFAULT)
    options = parser.parse_args()
    if min(options.steps, options.rounds) < 1:
        parser.error(
            f"--steps {options.steps} --rounds {options.rounds}: expected at least 1 of each"
        )
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # a round's median step over the bare loop's, less one
    over: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            here: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for kind in (*KINDS, *reversed(KINDS)):
                seconds = measure(kind, options.arguments, options.steps + UNCOUNTED, Path(folder))
                here[kind] += seconds
                print(f"{kind}: {statistics.median(seconds):.3f} s per step", flush=True)
            for kind, seconds in here.items():
                found[kind] += seconds
                over[kind].append(
                    statistics.median(seconds) / statistics.median(here["bare loop"]) - 1
                )
    body = [f"`{' '.join(options.arguments)}`, {options.rounds} rounds", ""]
    body += [
        "| | median step | over the bare loop, by rounds | least and most |",
        "|---|---|---|---|",
    ]
    for kind, seconds in found.items():
        least, middle, most = (
            f"{100 * f(over[kind]):+.1f} %" for f in (min, statistics.median, max)
        )
        body.append(f"| {kind} | {statistics.median(seconds):.3f} s | {middle} | {least}, {most} |")
    print("\n".join(body))
    results: dict[str, Any] = {
        "arguments": options.arguments,
        "steps": found,
        "over the bare loop": over,
    }
    report.write("overhead", "titanlite over a bare loop", body, results)


if __name__ == "__main__":
    main()
