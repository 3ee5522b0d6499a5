"""Fits the rates of each GPU, and the constants that all GPUs share, for `plan_rows.py`.

The rows of each GPU are shuffled by a seed. The first half fits, the second half judges. A rate or
a constant leaves its default only for a clear gain: few rows do not tell four rates apart. With
fewer than `ENOUGH` rows a GPU has no rates of its own.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plan_cases import Case

from titanlite.tools.plan.accuracy import KINDS, Error, Fitted, kind_of
from titanlite.tools.plan.step_time import SHARED, Rates, Shared

ENOUGH = 7
GRID = tuple(0.05 * step for step in range(3, 19))  # 0.15 to 0.9 of a peak
HOST_GRID = tuple(0.2 * step for step in range(2, 21))  # 0.4 to 4 ms
PRIOR = 0.3
SHARED_GRIDS: dict[str, tuple[float, ...]] = {
    "sharpness": (1.5, 2.0, 3.0, 4.0, 6.0),
    "message": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "triton_hopper": (0.3, 0.4, 0.5, 0.6, 0.8),
    "flash2_hopper": (0.4, 0.5, 0.6, 0.7, 0.8),
}


@dataclass(frozen=True)
class Halves:
    """The rows of a GPU, divided."""

    fitted: list[Case]
    judged: list[Case]


def halves(cases: list[Case], seed: int) -> dict[str, Halves]:
    """The timed rows by GPU."""
    by_type: dict[str, list[Case]] = {}
    for case in cases:
        if case.has_time:
            by_type.setdefault(case.machine.name, []).append(case)
    divided = {}
    for name, of_type in by_type.items():
        shuffled = list(of_type)
        random.Random(seed).shuffle(shuffled)
        half = (len(shuffled) + 1) // 2
        divided[name] = Halves(shuffled[:half], shuffled[half:])
    return divided


def loss_of(cases: list[Case], rates: Rates, shared: Shared) -> float:
    """The sum of |log(predicted / measured)|, and a price for each rate that leaves its default."""
    total = sum(abs(math.log(case.ratio(rates, shared))) for case in cases)
    for field in dataclasses.fields(Rates):
        default = getattr(Rates(), field.name)
        total += PRIOR * abs(math.log(getattr(rates, field.name) / default))
    return total


def fit_rates(cases: list[Case], shared: Shared) -> tuple[Rates, float]:
    """Fits one rate after the other. Also returns what is left of the loss."""
    rates = Rates()
    for _ in range(4):
        for name in ("products", "host_ms", "links", "attention"):
            values = HOST_GRID if name == "host_ms" else GRID
            candidates = [replace(rates, **{name: value}) for value in values]
            rates = min(candidates, key=lambda one: loss_of(cases, one, shared))
    return rates, loss_of(cases, rates, shared)


def fit_shared(divided: dict[str, Halves]) -> Shared:
    """Fits one constant after the other, with all rates fitted again for each value."""
    shared = SHARED

    def loss(candidate: Shared) -> float:
        return sum(fit_rates(half.fitted, candidate)[1] for half in divided.values())

    for name, values in SHARED_GRIDS.items():
        candidates = [replace(shared, **{name: value}) for value in values]
        shared = min(candidates, key=loss)
    return shared


def error_of(errors: Sequence[float]) -> Error:
    """Median and 90th percentile of absolute errors."""
    ordered = sorted(errors)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return Error(round(statistics.median(ordered), 4), round(p90, 4), len(ordered))


def fit_machine(half: Halves, shared: Shared) -> Fitted:
    """Fits the rates of a GPU, and judges them by its other half."""
    rates, _ = fit_rates(half.fitted, shared)
    by_kind: dict[str, list[float]] = {}
    errors = []
    for case in half.judged:
        error = abs(case.ratio(rates, shared) - 1)
        errors.append(error)
        by_kind.setdefault(kind_of(case.counts.degrees), []).append(error)
    constant = statistics.median(case.mfu for case in half.fitted)
    return Fitted(
        rates=tuple(round(value, 2) for value in dataclasses.astuple(rates)),
        rows=len(half.fitted) + len(half.judged),
        error=error_of(errors),
        by_kind={kind: error_of(by_kind[kind]) for kind in KINDS if kind in by_kind},
        constant_mfu=round(constant, 3),
        constant_error=error_of([abs(constant / case.mfu - 1) for case in half.judged]),
    )


def fit_all(divided: dict[str, Halves], shared: Shared) -> dict[str, Fitted]:
    """Fits each GPU with enough rows."""
    fitted = {}
    for name, half in divided.items():
        if len(half.fitted) + len(half.judged) >= ENOUGH:
            fitted[name] = fit_machine(half, shared)
    return fitted


def choice_losses(cases: list[Case], fitted: dict[str, Fitted], shared: Shared) -> list[float]:
    """Computes how much slower the layout with the best prediction is than the best measured one.

    One number for each group of rows that differ in their layout only.
    """
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        row = case.row
        batch = re.search(r"GBS[ =](\d+)", row["layout"])
        names = ("source", "gpus", "model", "seq", "precision", "ac")
        key = (case.machine.name, *(row[name] for name in names), batch[1] if batch else "")
        groups.setdefault(key, []).append(case)
    losses = []
    for group in groups.values():
        known = fitted.get(group[0].machine.name)
        if len({case.row["layout"] for case in group}) < 2 or known is None:
            continue
        rates = Rates(*known.rates)
        chosen = max(group, key=lambda case: case.predicted(rates, shared))
        best = max(case.measured for case in group)
        losses.append(best / chosen.measured - 1)
    return losses
