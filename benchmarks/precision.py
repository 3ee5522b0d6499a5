"""Measures what each step of the ladder of precision and memory costs in loss and speed.

    python benchmarks/precision.py [--config debug] [--steps 200] [--cases "float16; offloaded moments"] [KEY=VALUE ...]

Each case is a run of train.py in a separate process with the same data, seed and initial weights;
further arguments are keys of all of them. The table has the mean loss of all steps and of the last
tenth, their differences from fp32 in per cent, tokens per second of the second half (the median of
the logged steps), and the peak memory. float16 is left out on CPUs, which multiply it a hundred
times slower than fp32, unless `--cases` names it. An hour on two cores with debug's own batches;
shorter with `training.global_batch_size=4 training.seq_len=128`.
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

CASES = {
    "fp32": ["training.compute_dtype=float32"],
    "bfloat16": ["training.compute_dtype=bfloat16"],
    "float16": ["training.compute_dtype=float16"],
    "float8, emulated": ["training.compute_dtype=bfloat16", "float8.enabled", "float8.emulate"],
    "float8, one scale per row, emulated": [
        "training.compute_dtype=bfloat16",
        "float8.enabled",
        "float8.emulate",
        "float8.scaling=rowwise",
    ],
    "bfloat16 moments": ["training.compute_dtype=float32", "optimizer.state_dtype=bfloat16"],
    "bfloat16 parameters": ["training.compute_dtype=float32", "training.param_dtype=bfloat16"],
    "offloaded moments": ["training.compute_dtype=float32", "parallel.optimizer_offload"],
    "full recomputation": ["training.compute_dtype=float32", "recompute.mode=full"],
    "offloaded inputs of blocks": [
        "training.compute_dtype=float32",
        "recompute.mode=full",
        "recompute.offload",
    ],
    "deterministic": ["training.compute_dtype=float32", "debug.deterministic"],
}
ON_GPU_ONLY = ("float16",)


def measure(case: str, config: str, steps: int, keys: list[str]) -> dict[str, Any]:
    """Measures loss, speed and memory of one run; returns {"failed": reason} if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            *keys,
            *CASES[case],
            f"training.steps={steps}",
            f"run.folder={folder}",
            "run.name=case",
        ]
        options += [
            "metrics.log_freq=1",
            "validation.freq=0",
            "checkpoint.freq=0",
            "validation.prompts=",
        ]
        command = [
            sys.executable,
            str(report.ROOT / "train.py"),
            config,
            *(f"--{option}" for option in options),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=report.ROOT, env=os.environ, check=False
        )
        if done.returncode:
            last = next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message"
            )
            return {"failed": f"exit code {done.returncode}: {last[:200]}"}
        rows = [
            json.loads(line) for line in Path(folder, "case/metrics.jsonl").read_text().splitlines()
        ]
    losses = [row["loss"] for row in rows]
    return {
        "mean loss": statistics.mean(losses),
        "last losses": statistics.mean(losses[-max(1, steps // 10) :]),
        "tps": statistics.median(row["tps"] for row in rows[steps // 2 :]),
        "memory_gib": rows[-1]["memory_gib"],
        "skipped": rows[-1].get("skipped_steps", 0),
    }


def row(case: str, found: dict[str, Any], fp32: dict[str, Any]) -> str:
    """Writes a line of the table."""
    if "failed" in found:
        return f"| {case} | {found['failed']} | | | |"
    figures = []
    for name in ("mean loss", "last losses"):
        difference = 100 * (found[name] / fp32[name] - 1)
        figures.append(f"{found[name]:.4f} ({difference:+.3f} %)")
    return f"| {case} | {' | '.join(figures)} | {found['tps']:,.0f} | {found['memory_gib']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="debug")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", default="", help="separated by semicolons; fp32 is always run")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    names = [name.strip() for name in options.cases.split(";") if name.strip()]
    names = names or [name for name in CASES if cuda or name not in ON_GPU_ONLY]
    if bad := [name for name in names if name not in CASES]:
        parser.error(f"--cases {bad[0]!r}: expected some of {'; '.join(CASES)}")
    body = [
        "| case | mean loss | last tenth | tokens per second | peak GiB |",
        "|---|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for name in dict.fromkeys(["fp32", *names]):
        results[name] = measure(name, options.config, options.steps, options.keys)
        if "failed" in results["fp32"]:
            raise SystemExit(f"fp32: {results['fp32']['failed']}")
        body.append(row(name, results[name], results["fp32"]))
        print(body[-1], flush=True)
        report.write("precision", "Precision and memory", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
