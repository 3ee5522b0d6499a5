"""The cost of dropout on adapters: CPU seconds of a step with it, divided by those of a step
without.

    python benchmarks/adapters.py [--rounds 6]

The model of `debug` on one thread, not compiled, in the order A B B A. CPU seconds, unlike those of
a clock, hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import report
import torch
from contestants import Titanlite, make_batch
from throughput import CASES

UNCOUNTED = 2
# What is added -> the arguments with it and without
COSTS = {"dropout 0.05 on adapters": (CASES["debug, dropout"], CASES["debug, adapters"])}


def seconds(subject: Titanlite) -> float:
    """CPU seconds of one step."""
    batch = make_batch(subject.config, subject.device, 0)
    started = time.process_time()
    subject.step(*batch)
    return time.process_time() - started


def ratios_of(with_it: list[str], without: list[str], rounds: int) -> list[float]:
    subjects = (Titanlite(with_it), Titanlite(without))
    torch.set_num_threads(1)
    for _ in range(UNCOUNTED):
        for subject in subjects:
            seconds(subject)
    ratios = []
    for _ in range(rounds):
        order = [seconds(subjects[i]) for i in (0, 1, 1, 0)]
        ratios.append((order[0] + order[3]) / (order[1] + order[2]))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    body = [
        f"Other programs ran: the load of the machine was {load:.1f} at the start.",
        "",
        "| what is added | CPU seconds of a step, divided by those without: median | least | most |",
        "|---|---|---|---|",
    ]
    results = {}
    for name, (with_it, without) in COSTS.items():
        ratios = ratios_of(with_it, without, rounds)
        results[name] = ratios
        median = statistics.median(ratios)
        body.append(f"| {name} | {median:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    report.write("adapters", "The cost of dropout on adapters", body, results)


if __name__ == "__main__":
    main()
