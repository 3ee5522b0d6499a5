"""Measures scaling: throughput with more processes, and the share of communication in a step.

    python benchmarks/scaling.py [--processes 1,2,4] [--axis dp_shard] [--steps 10] [-- CONFIG --section.key=value ...]

Strong scaling keeps the global batch; weak scaling increases it with the number of processes. Each
number is a run of train.py with its launcher. Throughput is relative to one process with all cores
of the machine: on a CPU processes share the cores, so the best value is 1.00; on GPUs it is the
number of processes. The share of communication is the time of collectives in the profiler divided
by the time of the traced steps, on rank 0, including the time it waits for others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

DEFAULT = [
    "cpu_25m",
    "--training.seq_len=256",
    "--training.local_batch_size=1",
    "--parallel.pp_schedule=GPipe",
]
DEFAULT += ["--compile.enabled=false"]
ALONE = [
    "--checkpoint.freq=0",
    "--validation.freq=0",
    "--metrics.log_freq=1",
    "--validation.prompts=",
]
TRACED = ["--profiling.enabled", "--profiling.warmup_steps=1", "--profiling.active_steps=2"]
UNCOUNTED = 3
BATCH = 4  # sequences over all processes, in strong scaling
# Names of collectives in a trace
ON_CPU, ON_GPU = ("gloo:", "c10d::", "record_param_comms"), "nccl"


def run(
    processes: int, sequences: int, options: argparse.Namespace, traced: bool
) -> tuple[float, float]:
    """Runs; returns (tokens per second over all processes, share of communication or 0)."""
    with tempfile.TemporaryDirectory() as folder:
        steps = options.steps + UNCOUNTED
        extra = [*TRACED, f"--profiling.freq={steps}"] if traced else []
        command = [
            str(report.ROOT / "run_train.sh"),
            *options.arguments,
            *ALONE,
            *extra,
            f"--run.folder={folder}",
            "--run.name=run",
            f"--training.steps={steps}",
            f"--training.global_batch_size={sequences}",
            f"--parallel.{options.axis}={processes}",
        ]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"NGPU": str(processes), "PATH": path}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise SystemExit(done.stdout)
        rows = [
            json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()
        ]
        speed = statistics.median(row["tps_global"] for row in rows[UNCOUNTED:])
        return speed, communication(Path(folder, "run/traces")) if traced else 0.0


def communication(folder: Path) -> float:
    """Computes the share of collectives in rank 0's traced steps: the union of their intervals over
    the whole time.
    """
    events = json.loads(gzip.decompress(sorted(folder.glob("*rank-0.json.gz"))[0].read_bytes()))[
        "traceEvents"
    ]
    spans = [
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in events
        if e.get("ph") == "X" and e.get("dur")
    ]
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    kernels = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "kernel"]
    found = [span for span in kernels if span[2].startswith(ON_GPU)] or [
        s for s in spans if s[2].startswith(ON_CPU)
    ]
    busy, reached = 0.0, 0.0
    for begin, end, _ in sorted(found):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument(
        "--axis", default="dp_shard", choices=("dp_shard", "dp_replicate", "tp", "cp", "pp")
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("arguments", nargs="*", default=DEFAULT)
    options = parser.parse_args()
    body = [f"`{' '.join(options.arguments)}`, {options.axis}", ""]
    body += [
        "| processes | scaling | sequences per step | tok/s | of one process | communication |"
    ]
    body += ["|---|---|---|---|---|---|"]
    results: list[dict[str, Any]] = []
    base: dict[str, float] = {}
    for processes in map(int, options.processes.split(",")):
        for kind, sequences in (("strong", BATCH), ("weak", BATCH * processes)):
            speed, _ = run(processes, sequences, options, traced=False)
            _, share = run(processes, sequences, options, traced=True)
            base.setdefault(kind, speed)
            ratio = speed / base[kind]
            results.append(
                {"processes": processes, "kind": kind, "tok/s": speed, "communication": share}
            )
            body.append(
                f"| {processes} | {kind} | {sequences} | {speed:,.0f} | {ratio:.2f} | "
                f"{100 * share:.0f} % |"
            )
            print(body[-1], flush=True)
            report.write("scaling", f"More processes along {options.axis}", body, results)


if __name__ == "__main__":
    main()
