"""The cost of dropout on adapters: CPU seconds of a step with it, divided by those without.

    python benchmarks/dropout.py [--rounds 6]

The cases "debug, dropout" and "debug, adapters" of `throughput.py` on one thread, in the order A B B
A. CPU seconds, unlike those of a clock, hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import time

import report
import torch
from contestants import Titanlite, make_batch
from throughput import CASES

UNCOUNTED = 2


def seconds(subject: Titanlite) -> float:
    """CPU seconds of one step."""
    batch = make_batch(subject.config, subject.device, 0)
    started = time.process_time()
    subject.step(*batch)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    dropping = Titanlite(CASES["debug, dropout"])
    plain = Titanlite(CASES["debug, adapters"])
    torch.set_num_threads(1)
    for _ in range(UNCOUNTED):
        seconds(dropping)
        seconds(plain)
    ratios = []
    for _ in range(rounds):
        order = [seconds(subject) for subject in (dropping, plain, plain, dropping)]
        ratios.append((order[0] + order[3]) / (order[1] + order[2]))
    median = statistics.median(ratios)
    line = f"{median:.2f} times the CPU seconds ({min(ratios):.2f} to {max(ratios):.2f})"
    report.write("dropout", "Dropout on adapters", [line], ratios)


if __name__ == "__main__":
    main()
