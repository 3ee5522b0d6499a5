"""Compares the validation losses of Muon and AdamW on the same tokens, each with the best of three
learning rates.

    python benchmarks/optimizers.py                            # `debug`: two minutes a run on two cores, six runs
    python benchmarks/optimizers.py --config cpu_25m           # half an hour a run, without other work on the machine

A run is train.py on the default corpus, so both optimizers see the same samples in the same order.
A learning rate at the end of the three is marked, because a better one may lie beyond it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

STEPS = {"debug": 800, "cpu_25m": 500}
WARMUP = {"debug": 30 / 800, "cpu_25m": 100 / 500}  # share of the steps
RATES = {
    "debug": {"adamw": (1.5e-3, 3e-3, 6e-3), "muon": (3e-3, 6e-3, 1.2e-2)},
    "cpu_25m": {"adamw": (1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3)},
}


def train(
    config: str, name: str, rate: float, steps: int, warmup: int, seed: int
) -> dict[str, Any]:
    """Trains; returns the validation loss after the last step and the seconds of a step, or
    {"failed": reason}.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "optimizer.name": name,
            "optimizer.lr": rate,
            "training.steps": steps,
            "schedule.warmup_steps": warmup,
            "run.folder": folder,
            "run.name": "run",
            "run.seed": seed,
            "validation.prompts": [],
            "checkpoint.freq": 0,
            "validation.freq": steps,
        }
        command = [
            sys.executable,
            "train.py",
            config,
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return {
                "failed": f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
            }
        rows = [
            json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()
        ]
    (loss,) = [
        v
        for row in rows[-2:]
        for k, v in row.items()
        if k.startswith("validation/") and k.endswith("/loss")
    ]
    logged = [row for row in rows if "seconds" in row]
    first, last = logged[1], logged[-1]  # without the first step, in which blocks are compiled
    seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return {"loss": loss, "tokens": last["tokens"], "seconds per step": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="debug", choices=list(RATES))
    parser.add_argument(
        "--steps", type=int, default=0, help="default: 800 for debug, 500 for cpu_25m"
    )
    for name in ("adamw", "muon"):
        parser.add_argument(
            f"--{name}", type=float, nargs=3, metavar="RATE", help="three learning rates"
        )
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    steps = options.steps or STEPS[options.config]
    warmup = round(WARMUP[options.config] * steps)
    rates = {
        name: sorted(getattr(options, name) or found)
        for name, found in RATES[options.config].items()
    }
    results: dict[str, Any] = {}
    body = [
        "| optimizer | learning rate | validation loss | seconds per step |",
        "|---|---|---|---|",
    ]
    for name in rates:
        for rate in rates[name]:
            results[f"{name} {rate:g}"] = one = train(
                options.config, name, rate, steps, warmup, options.seed
            )
            found = one.get("failed") or f"{one['loss']:.4f} | {one['seconds per step']:.3f}"
            body.append(f"| {name} | {rate:g} | {found} |")
            print(body[-1], flush=True)
    body.append("")
    for name in rates:
        losses = {
            rate: results[f"{name} {rate:g}"].get("loss", float("inf")) for rate in rates[name]
        }
        best = min(losses, key=lambda rate: losses[rate])
        edge = (
            ""
            if best == rates[name][1]
            else ", at the end of the three: a better one may lie beyond it"
        )
        body.append(f"- best of {name}: {losses[best]:.4f} with learning rate {best:g}{edge}")
        print(body[-1], flush=True)
    tokens = next((one["tokens"] for one in results.values() if "tokens" in one), 0)
    body.append(
        f"- {options.config}, {steps} steps ({warmup} of warmup), {tokens:,} tokens, seed "
        f"{options.seed}"
    )
    report.write(f"optimizers_{options.config}", "Optimizers", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
