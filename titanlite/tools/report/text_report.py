"""The report as text of at most 80 columns, for a terminal.

What it is: the final table, a line of blocks for each important column, the findings and the last
events. A block is the mean of the values of its part of the run; a line is scaled between its own
smallest and largest value.
"""

from __future__ import annotations

import textwrap

import numpy as np

from titanlite.runtime.errors import printable
from titanlite.tools.report.facts import differences, findings, table
from titanlite.tools.report.fit import Trend
from titanlite.tools.report.run_data import Column, Run

WIDTH = 80
LABEL = 22
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"
CURVES = {
    "loss": ("training loss", "{:.4g}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "lr": ("learning rate", "{:.2e}"),
    "tps_global": ("tokens per second", "{:,.0f}"),
    "mfu": ("MFU, %", "{:.1f}"),
    "memory_gib": ("memory, GiB", "{:.2f}"),
    "noise_scale": ("noise scale", "{:.3g}"),
}
LAST_EVENTS = 10


def text_report(runs: list[Run], trends: list[Trend], blocks: bool = True) -> str:
    """The report of all runs, and the settings in which they differ."""
    lines = list[str]()
    for run, found in zip(runs, trends, strict=True):
        lines += [printable(run.name)[:WIDTH], "=" * min(WIDTH, len(printable(run.name))), ""]
        lines += [line for name, value in table(run) for line in _row(name, value)]
        lines += ["", *_curves(run, blocks), ""]
        for finding in findings(run, found):
            lines += textwrap.wrap(
                printable(finding), WIDTH, initial_indent="* ", subsequent_indent="  "
            )
        lines += ["", *_events(run)]
    if len(runs) > 1 and (differ := differences(runs))["rows"]:
        lines += [differ["title"], ""]
        for key, *values in differ["rows"]:
            lines += _row(key, "  |  ".join(values))
    return "\n".join(lines).rstrip()


def _row(name: str, value: str) -> list[str]:
    name = printable(name)
    width = max(LABEL, len(name) + 2) if len(name) < 40 else LABEL
    first, *more = textwrap.wrap(printable(value), WIDTH - width) or [""]
    names = (
        [f"{name:<{width}}{first}"]
        if len(name) < width
        else [*textwrap.wrap(name, WIDTH), " " * width + first]
    )
    return names + [" " * width + text for text in more]


def _curves(run: Run, blocks: bool) -> list[str]:
    """A line for each column with at least two values: first value, blocks, last value."""
    chosen = {name: run.columns[name] for name in CURVES if name in run.columns}
    sets = [
        name for name in run.columns if name.startswith("validation/") and name.endswith("/loss")
    ]
    lines = []
    for name, column in {**chosen, **{name: run.columns[name] for name in sets[:4]}}.items():
        label, form = CURVES.get(
            name, (name.replace("validation/", "validation, ").removesuffix("/loss"), "{:.4g}")
        )
        if len(column.values) > 1:
            start, end = (form.format(value) for value in (column.values[0], column.values[-1]))
            line = sparkline(
                column, WIDTH - LABEL - 2 - max(9, len(start)) - max(9, len(end)), blocks
            )
            lines.append(f"{printable(label)[: LABEL - 1]:<{LABEL}}{start:>9} {line} {end}")
    return lines


def sparkline(column: Column, width: int, blocks: bool = True) -> str:
    """`width` characters from the first step to the last; a space where nothing was logged."""
    first = float(column.steps[0])
    last = float(column.steps[-1])
    at = np.minimum(((column.steps - first) / (last - first) * width).astype(int), width - 1)
    counts = np.bincount(at, minlength=width)
    means = np.bincount(at, column.values, width) / np.maximum(counts, 1)
    low = means[counts > 0].min()
    high = means[counts > 0].max()
    signs = BLOCKS if blocks else ASCII
    # Sums of equal values differ in their last digits
    constant = high - low <= 1e-9 * max(abs(high), abs(low))
    heights = np.zeros(width) if constant else (means - low) / (high - low) * (len(signs) - 1)
    return "".join(
        signs[round(h)] if n else " "
        for h, n in zip(heights.tolist(), counts.tolist(), strict=True)
    )


def _events(run: Run) -> list[str]:
    """The last events."""
    if not run.events:
        return []
    shown = run.events[-LAST_EVENTS:]
    lines = [f"last events ({len(shown)} of {len(run.events)})"]
    for event in shown:
        text = f"step {event.step:>8,}  {printable(event.name):<9} {printable(event.text)}"
        lines.append(text if len(text) <= WIDTH else text[: WIDTH - 3] + "...")
    return [*lines, ""]
