"""Measures the share of a training step that the guard against bad steps takes.

    python benchmarks/guard.py [--steps 12] [-- CONFIG --section.key=value ...]

Whole steps with and without the guard differ by less than single steps vary on a shared machine
(`levers.py` has that pair). So this measures the parts: `judge`, and the optimizer's step with and
without `found_inf`, in turn. The default is 26 million parameters with a window of losses and
gradient norms. Takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from contestants import Titanlite, make_batch
from throughput import CASES

UNCOUNTED = 2


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Wraps a call so that it also appends its time, which includes the device's work."""

    def wrapped(*arguments: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = call(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        return result

    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("config", nargs="*", default=CASES["25m, guarded"])
    options = parser.parse_args()
    trainer = Titanlite(options.config)
    steps, judged = list[float](), list[float]()
    updates: dict[bool, list[float]] = {True: [], False: []}  # with `found_inf`, and without
    trainer.parts.guard.judge = timed(trainer.parts.guard.judge, judged)  # type: ignore[method-assign]
    update = trainer.parts.optimizer.step

    def alternate() -> None:
        guarded = trainer.steps % 2 == 0
        if not guarded:
            del trainer.parts.optimizer.found_inf  # type: ignore[attr-defined]
        timed(update, updates[guarded])()

    trainer.parts.optimizer.step = alternate  # type: ignore[method-assign, assignment]
    step = timed(trainer.step, steps)
    for number in range(UNCOUNTED + options.steps):
        step(*make_batch(trainer.config, trainer.device, number))
    whole, judge = statistics.median(steps[UNCOUNTED:]), statistics.median(judged[UNCOUNTED:])
    with_flag, without = (
        statistics.median(updates[guarded][UNCOUNTED // 2 :]) for guarded in (True, False)
    )
    added = judge + max(0.0, with_flag - without)
    rows = [
        "| part | milliseconds |",
        "|---|---|",
        f"| a step | {1e3 * whole:,.1f} |",
        f"| `judge` | {1e3 * judge:.2f} |",
        f"| the optimizer's step with `found_inf` | {1e3 * with_flag:.2f} |",
        f"| the same without | {1e3 * without:.2f} |",
        "",
        f"The guard adds {100 * added / whole:.2f} % to a step of `{' '.join(options.config)}`.",
    ]
    print("\n".join(rows))
    results = {
        "step": steps,
        "judge": judged,
        "update guarded": updates[True],
        "update": updates[False],
    }
    report.write("guard", "The guard's share of a step", rows, results)


if __name__ == "__main__":
    main()
