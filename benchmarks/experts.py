"""Measures the mixture of experts `debug_moe`: the axis ep beside dp_shard, and the auxiliary loss.

    python benchmarks/experts.py [--rounds 3] [--steps 20] [--folder FOLDER]

Each number is a run of train.py with its launcher. First two processes train with `dp_shard` 2
alone and with `ep` 2 added, in the order A B B A in each round. In both a process holds half of all
parameters; with `ep` rows of tokens are sent in place of the experts' weights. Then the preset
trains to its end with the auxiliary loss and without it; the load of an expert is its number of
tokens over the mean, and the figure is that of the most loaded one of each block, in the mean of
the last 100 steps. A run that FOLDER holds to its end is not repeated.
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

QUIET = ["--checkpoint.freq=0", "--validation.prompts="]
LAYOUTS = {
    "dp_shard 2": ["--parallel.dp_shard=2"],
    "ep 2": ["--parallel.dp_shard=2", "--parallel.ep=2"],
}
UNCOUNTED = 3  # steps
COEFFICIENTS = (0.01, 0.0)
LAST = 100  # steps


def train(processes: int, folder: Path, name: str, options: list[str]) -> list[dict[str, Any]]:
    """Trains, unless the folder holds the run; returns its rows of metrics."""
    metrics = folder / name / "metrics.jsonl"
    if not metrics.exists():
        command = [
            str(report.ROOT / "run_train.sh"),
            "debug_moe",
            *QUIET,
            *options,
            f"--run.folder={folder}",
            f"--run.name={name}",
        ]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"NGPU": str(processes), "PATH": path}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def speed(layout: str, steps: int, batch: int) -> float:
    """Measures tokens per second over both processes, in the median of the steps."""
    options = [
        *LAYOUTS[layout],
        f"--training.steps={steps + UNCOUNTED}",
        f"--training.local_batch_size={batch}",
        "--metrics.log_freq=1",
        "--validation.freq=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = train(2, Path(folder), "run", options)
    return statistics.median(row["tps_global"] for row in rows[UNCOUNTED:] if "tps_global" in row)


def layouts(rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Compares the two layouts in the order A B B A."""
    first, second = LAYOUTS
    speeds: dict[str, list[float]] = {first: [], second: []}
    ratios = []
    for _ in range(rounds):
        turns: dict[str, list[float]] = {first: [], second: []}
        for layout in (first, second, second, first):
            turns[layout].append(speed(layout, steps, batch))
        ratios.append(statistics.mean(turns[second]) / statistics.mean(turns[first]))
        for layout, found in turns.items():
            speeds[layout] += found
        print(f"{batch} sequences: {turns}", flush=True)
    return {"speeds": speeds, "ratios": ratios, "ratio": statistics.median(ratios)}


def balance(folder: Path, coefficient: float) -> dict[str, Any]:
    """Trains the preset with a coefficient of the auxiliary loss."""
    option = f"--loss.router_aux_loss={coefficient:g}"
    rows = train(1, folder, f"aux{coefficient:g}", [option])
    logged = [row for row in rows if "expert_load" in row]
    last = [row for row in logged if row["step"] > logged[-1]["step"] - LAST]
    blocks = [name for name in logged[-1] if name.startswith("expert_load/")]
    validated = [row for row in rows if any(name.endswith("/loss") for name in row)][-1]
    return {
        "load": {name: statistics.mean(row[name] for row in last) for name in blocks},
        "highest load": statistics.mean(row["expert_load"] for row in last),
        "validation loss": next(validated[name] for name in validated if name.endswith("/loss")),
        "seconds": logged[-1]["seconds"],
        "steps": logged[-1]["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", default="2,4", help="local batch sizes")
    parser.add_argument("--folder", type=Path, help="keeps the runs of the preset")
    options = parser.parse_args()
    load = os.getloadavg()
    results: dict[str, Any] = {"load average before": load, "layouts": {}, "auxiliary loss": {}}
    body = ["| sequences per process and local batch | dp_shard 2 | ep 2 | ratio | by round |"]
    body.append("|---|---|---|---|---|")
    for batch in map(int, options.batches.split(",")):
        found = layouts(options.rounds, options.steps, batch)
        results["layouts"][str(batch)] = found
        shown = [f"{statistics.median(speeds):,.0f} tok/s" for speeds in found["speeds"].values()]
        by_round = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
        body.append(f"| {batch} | {shown[0]} | {shown[1]} | {found['ratio']:.2f} | {by_round} |")
        print(body[-1], flush=True)
    body += ["", "| auxiliary loss | load, by block | highest | validation loss | steps |"]
    body.append("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for coefficient in COEFFICIENTS:
            found = balance(options.folder or Path(temporary), coefficient)
            results["auxiliary loss"][f"{coefficient:g}"] = found
            blocks = ", ".join(f"{value:.2f}" for value in found["load"].values())
            body.append(
                f"| {coefficient:g} | {blocks} | {found['highest load']:.2f} "
                f"| {found['validation loss']:.3f} | {found['steps']} |"
            )
            print(body[-1], flush=True)
    after = ", ".join(f"{value:.1f}" for value in (load[0], os.getloadavg()[0]))
    body = [f"Load average of the machine before and after: {after}.", "", *body]
    report.write("ep_and_balance", "ep beside dp_shard, and the auxiliary loss", body, results)


if __name__ == "__main__":
    main()
