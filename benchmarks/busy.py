"""Measures training beside another process that computes, with GNU OpenMP's waits and titanlite's.

    python benchmarks/busy.py [--rounds 1] [--steps 16] [--cases debug:1 debug:2 debug:4 cpu_25m:1]

OpenMP threads wait for each other by spinning before they sleep. If another process needs one of
the cores, a thread may spend its time slice spinning while the thread that it waits for cannot run.
Each case trains, on a quiet machine and beside a process that computes without end,
with `GOMP_SPINCOUNT=300000` (the library's default) and with the value that the command titanlite
sets, in the order A B B A. The result is the median of tokens per second, over all processes, after
four steps. Takes a quarter of an hour.
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

OPTIONS = [
    "--metrics.log_freq=1",
    "--validation.freq=0",
    "--validation.prompts=",
    "--checkpoint.freq=0",
]
KINDS = {"default": {"GOMP_SPINCOUNT": "300000"}, "titanlite": {}}
UNCOUNTED = 4


def train(flavor: str, processes: int, steps: int, variables: dict[str, str]) -> list[float]:
    """Trains; returns tokens per second of each counted step, over all processes."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment = inherited | {"NGPU": str(processes), "PYTHONPATH": str(report.ROOT)} | variables
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "titanlite",
            "train",
            flavor,
            f"--run.folder={folder}",
            "--run.name=run",
        ]
        command += [f"--training.steps={steps + UNCOUNTED}", *OPTIONS]
        subprocess.run(
            command, cwd=report.ROOT, env=environment, stdout=subprocess.DEVNULL, check=True
        )
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["tps_global"] for line in lines[UNCOUNTED:]]


def measure(flavor: str, processes: int, steps: int, rounds: int, busy: bool) -> dict[str, float]:
    """Returns the median tokens per second of each kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        for kind in [*KINDS, *reversed(KINDS)] * rounds:
            found[kind] += train(flavor, processes, steps, KINDS[kind])
    finally:
        if other is not None:
            other.kill()
    return {kind: statistics.median(values) for kind, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--cases", nargs="+", default=["debug:1", "debug:2", "debug:4", "cpu_25m:1"]
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    body = [
        "| flavor, processes | default, quiet | default, busy | titanlite, quiet | titanlite, "
        "busy |",
        "|---" * 5 + "|",
    ]
    for case in options.cases:
        flavor, _, processes = case.partition(":")
        quiet, busy = (
            measure(flavor, int(processes), options.steps, options.rounds, b) for b in (False, True)
        )
        results[case] = {"quiet": quiet, "busy": busy}
        first = quiet["default"]
        cells = [
            f"{found[kind]:,.0f} ({found[kind] / first:.2f})"
            for kind in KINDS
            for found in (quiet, busy)
        ]
        body.append(f"| {flavor}, {processes} | " + " | ".join(cells) + " |")
        print(body[-1], flush=True)
    body += ["", "Tokens per second over all processes, and as a part of the first column."]
    report.write("busy", "Training beside another process that computes", body, results)


if __name__ == "__main__":
    main()
