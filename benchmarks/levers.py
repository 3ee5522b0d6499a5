"""Measures the effect of each option on speed: the same model with and without it, on this device.

    python benchmarks/levers.py [--pairs "25m, full/25m; ..."] [--rounds 6]

Each pair is two cases of `throughput.py` in one process: rounds of steps in the order A B B A,
after a few that are not measured, and the median over the rounds of the ratio of their speeds. So a
drift of the machine's speed affects both. On a CPU half of the rounds run in a second process in
which B is built first, because the placement of memory changes the speed by some per cent. Peak
memory is in the table of `throughput.py`, which runs each case in a separate process. Takes ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
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
        "25m/25m, by FSDP",
        "25m/25m, by FSDP, kept",
        "25m, fp32/25m, fp32, not compiled",
        "25m, compiled loss/25m",
        "25m, 4 chunks/25m",
        "25m, full/25m",
        "25m, guarded/25m",
        "25m/25m, no step times",
        "debug, documents/debug",
        "25m, documents/25m",
        "debug, dropout/debug, adapters",
        "25m, dropout/25m, adapters",
        "25m, dropout, not compiled/25m, adapters, not compiled",
    ],
    # The memory budget is one setting for a whole process, so only throughput.py has its case.
    "gpu": [
        f"{name}/1b"
        for name in CASES
        if name.startswith("1b, ")
        and not name.endswith(("8192", "budget 0.5", "batch 4", "batch 8"))
    ],
}
UNCOUNTED = 3


def child(pair: str, rounds: int, order: list[int]) -> dict[str, Any]:
    """Measures one pair in this process: the seconds of all steps, and the ratio of each round."""
    from contestants import Titanlite, make_batch, side_by_side, timed

    built = {i: Titanlite(CASES[pair.split("/")[i]]) for i in order}
    a, b = built[0], built[1]
    # On a GPU a turn is many steps, which the host launches ahead as it does in training.
    batches = [make_batch(a.config, a.device, 0)] * (10 if a.device.type == "cuda" else 1)
    for subject in (a, b):
        timed(subject.step, batches[:1] * UNCOUNTED, a.device)
    seconds, ratios = side_by_side(a.step, b.step, batches, a.device, rounds)
    return {"ratios": ratios, "seconds": seconds}


def measure(pair: str, rounds: int, orders: tuple[str, ...]) -> dict[str, Any]:
    """Measures a pair in one process per order of building; each runs a share of the rounds."""
    found = []
    for order in orders:
        command = [
            sys.executable,
            __file__,
            "--child",
            pair,
            order,
            "--rounds",
            str(math.ceil(rounds / len(orders))),
        ]
        found.append(report.child(command))
    if failed := report.failure(*found):
        return {"failed": failed}
    return {
        "ratio": statistics.median(ratio for one in found for ratio in one["ratios"]),
        "seconds": [
            statistics.median(second for one in found for second in one["seconds"][i])
            for i in (0, 1)
        ],
        "by process": [statistics.median(one["ratios"]) for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--pairs",
        default="",
        help="cpu, gpu, or A/B; A/B of throughput's cases; default: by the device",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    if options.child:
        pair, order = options.child
        print(json.dumps(child(pair, options.rounds, [int(i) for i in order])), flush=True)
        os._exit(0)  # gloo's threads can abort an orderly end
    import torch

    cuda = torch.cuda.is_available()
    chosen = options.pairs or ("gpu" if cuda else "cpu")
    pairs = PAIRS.get(chosen) or [pair.strip() for pair in chosen.split(";")]
    if bad := [pair for pair in pairs if len(named(pair.split("/"))) != 2]:
        parser.error(f"--pairs {bad[0]!r}: expected two cases, as in 25m, full/25m")
    body = [
        "| case | against | times as fast | by process | seconds per step |",
        "|---|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for pair in pairs:
        a, b = pair.split("/")
        one = measure(pair, options.rounds, ("01",) if cuda else ("01", "10"))
        results[pair] = one
        if "failed" in one:  # continue with the others
            body.append(f"| {a} | {b} | {one['failed']} | | |")
            print(body[-1], flush=True)
            continue
        by_process = ", ".join(f"{ratio:.2f}" for ratio in one["by process"])
        seconds = ", ".join(f"{second:.3f}" for second in one["seconds"])
        body.append(f"| {a} | {b} | {one['ratio']:.2f} | {by_process} | {seconds} |")
        print(body[-1], flush=True)
        lines = [
            *body,
            "",
            *(
                f"- {name}: `{' '.join(CASES[name])}`"
                for pair in results
                for name in pair.split("/")
            ),
        ]
        report.write(
            f"levers_{chosen}" if chosen in PAIRS else "levers",
            "Levers",
            list(dict.fromkeys(lines)),
            results,
        )
    report.exit_code(results)


if __name__ == "__main__":
    main()
