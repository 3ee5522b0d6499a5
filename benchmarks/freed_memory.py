"""Measures the effect of keeping the memory of freed tensors (`keep_freed_memory` in
titanlite/runtime/device.py).

    python benchmarks/freed_memory.py [--cases "debug;25m"] [--steps 12] [--rounds 2]

Each case of `throughput.py` runs in separate processes in the order A B B A, once a round: A as it
is, B with an environment that leaves the C library's default. The medians of speed and peak memory
are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import report
from throughput import measure, named

DEFAULT = {"GLIBC_TUNABLES": ""}  # set, so titanlite changes nothing


def compare(case: str, steps: int, rounds: int) -> dict[str, Any]:
    """Runs both sides; returns their results in the order of the runs."""
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        del os.environ[name]
    for side in (0, 1, 1, 0) * rounds:
        os.environ.pop("GLIBC_TUNABLES", None)
        os.environ.update(DEFAULT if side else {})
        found[side].append(measure(case, steps))
    if failed := report.failure(*found[0], *found[1]):
        return {"failed": failed}
    return {
        "seconds": [[one["p50"] for one in side] for side in found],
        "GiB": [[one["GiB"] for one in side] for side in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cases", default="debug;25m, fp32;25m;124m", help="names of cases, with ;"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    body = [
        "| case | s per step: kept, default | times as fast | peak GiB: kept, default |",
        "|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for case in named([name.strip() for name in options.cases.split(";")]):
        results[case] = one = compare(case, options.steps, options.rounds)
        if "failed" in one:
            body.append(f"| {case} | {one['failed']} | | |")
        else:
            (kept, default), (less, more) = (
                [statistics.median(side) for side in one[key]] for key in ("seconds", "GiB")
            )
            body.append(
                f"| {case} | {kept:.3f}, {default:.3f} | {default / kept:.2f} | {less:.2f}, "
                f"{more:.2f} |"
            )
        print(body[-1], flush=True)
    report.write("freed_memory", "Keeping the memory of freed tensors", body, results)
    report.exit_code(results)


if __name__ == "__main__":
    main()
