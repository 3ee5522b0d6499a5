"""What does each lever bring on this device, against the same model without it?

    python benchmarks/levers.py [--pairs "25m, full/25m; ..."] [--rounds 6]

Each pair is two cases of `throughput.py`, both in one process: rounds of steps in the order A B B A after a few that do
not count, and the median over the rounds of how much faster A is. So a machine whose speed drifts counts for both.
Memory is in the table of `throughput.py`, where each case has a process of its own. Six minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import report
from throughput import CASES, named

PAIRS = {
    "cpu": [
        "debug, compiled/debug",
        "debug, bf16/debug",
        "256 wide, bf16/256 wide, fp32",
        "256 wide, bf16, compiled/256 wide, bf16",
        "25m/25m, fp32",
        "25m/25m, not compiled",
        "25m, fp32/25m, fp32, not compiled",
        "25m, compiled loss/25m",
        "25m, 4 chunks/25m",
        "25m, full/25m",
    ],
    "gpu": [f"{name}/1b" for name in CASES if name.startswith("1b, ") and "8192" not in name],
}
UNCOUNTED = 3


def child(pair: str, rounds: int) -> dict[str, Any]:
    """Measures one pair in this process."""
    from contestants import Titanlite, make_batch, side_by_side, timed

    a, b = (Titanlite(CASES[name]) for name in pair.split("/"))
    batch = make_batch(a.config, a.llama, a.device, 0)
    for subject in (a, b):
        timed(subject.step, [batch] * UNCOUNTED, a.device)
    first, second, ratio = side_by_side(a.step, b.step, [batch], a.device, rounds)
    return {"ratio": ratio, "seconds": [statistics.median(one.steps) for one in (first, second)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--pairs", default="", help="cpu, gpu, or A/B; A/B of throughput's cases; default: by the device"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    if options.child:
        print(json.dumps(child(options.child, options.rounds)), flush=True)
        os._exit(0)  # gloo's threads can abort an orderly end
    import torch

    chosen = options.pairs or ("gpu" if torch.cuda.is_available() else "cpu")
    pairs = PAIRS.get(chosen) or [pair.strip() for pair in chosen.split(";")]
    if bad := [pair for pair in pairs if len(named(pair.split("/"))) != 2]:
        parser.error(f"--pairs {bad[0]!r}: expected two cases, as in 25m, full/25m")
    body = ["| case | against | times as fast | seconds per step |", "|---|---|---|---|"]
    results: dict[str, Any] = {}
    for pair in pairs:
        command = [sys.executable, __file__, "--child", pair, "--rounds", str(options.rounds)]
        environment = os.environ | {"PYTHONPATH": str(report.ROOT)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        a, b = pair.split("/")
        if done.returncode:  # too much memory for two, or a device that cannot; the others go on
            body.append(f"| {a} | {b} | failed | |")
            continue
        results[pair] = one = json.loads(done.stdout.splitlines()[-1])
        body.append(f"| {a} | {b} | {one['ratio']:.2f} | {one['seconds'][0]:.3f}, {one['seconds'][1]:.3f} |")
        print(body[-1], flush=True)
        lines = [*body, "", *(f"- {name}: `{' '.join(CASES[name])}`" for pair in results for name in pair.split("/"))]
        report.write(f"levers_{chosen}" if chosen in PAIRS else "levers", "Levers", list(dict.fromkeys(lines)), results)


if __name__ == "__main__":
    main()
