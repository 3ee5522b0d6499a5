"""Measures the mixture of experts `debug_moe`: the axis ep beside dp_shard, and the auxiliary loss.

    python benchmarks/experts.py [--only layouts] [--rounds 5] [--steps 30] [--batches 2,4]

Each number is a run of train.py with its launcher. First two processes train with `dp_shard` 2
alone and with `ep` 2 added, in the order A B B A in each round. In both a process holds half of all
parameters; with `ep` rows of tokens are sent in place of the experts' weights. Then the preset
trains to its end with the auxiliary loss and without it; the load of an expert is its number of
tokens over the mean, and the figure is that of the most loaded one of each block, in the mean of
the last 100 steps. Takes twenty minutes on two cores.
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
    """Trains; returns the rows of metrics."""
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
    metrics = folder / name / "metrics.jsonl"
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


def report_layouts(rounds: int, steps: int, batches: list[int]) -> None:
    """Writes the speeds of the two layouts."""
    load = os.getloadavg()[0]
    results: dict[str, Any] = {}
    table = ["| sequences per process and local batch | dp_shard 2 | ep 2 | ratio | by round |"]
    table.append("|---|---|---|---|---|")
    for batch in batches:
        found = layouts(rounds, steps, batch)
        results[str(batch)] = found
        shown = [f"{statistics.median(speeds):,.0f} tok/s" for speeds in found["speeds"].values()]
        by_round = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
        table.append(f"| {batch} | {shown[0]} | {shown[1]} | {found['ratio']:.2f} | {by_round} |")
        print(table[-1], flush=True)
    after = os.getloadavg()[0]
    about = f"Load average of the machine before and after: {load:.1f}, {after:.1f}."
    report.write("ep_beside_dp_shard", "ep beside dp_shard", [about, "", *table], results)


def report_balance(folder: Path) -> None:
    """Writes the loads with and without the auxiliary loss."""
    results: dict[str, Any] = {}
    table = ["| auxiliary loss | load, by block | highest | validation loss | steps |"]
    table.append("|---|---|---|---|---|")
    for coefficient in COEFFICIENTS:
        found = balance(folder, coefficient)
        results[f"{coefficient:g}"] = found
        blocks = ", ".join(f"{value:.2f}" for value in found["load"].values())
        table.append(
            f"| {coefficient:g} | {blocks} | {found['highest load']:.2f} "
            f"| {found['validation loss']:.3f} | {found['steps']} |"
        )
        print(table[-1], flush=True)
    report.write("router_aux_loss", "The auxiliary loss of the router", table, results)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("layouts", "balance"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batches", default="2,4", help="local batch sizes")
    options = parser.parse_args()
    if options.only != "balance":
        batches = [int(batch) for batch in options.batches.split(",")]
        report_layouts(options.rounds, options.steps, batches)
    if options.only != "layouts":
        with tempfile.TemporaryDirectory() as folder:
            report_balance(Path(folder))


if __name__ == "__main__":
    main()
