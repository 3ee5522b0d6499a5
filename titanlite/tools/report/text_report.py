"""Formats the report as text of at most 80 columns, for a terminal.

What it is: the final table, a line of blocks for each important column, the findings and the last
events. A block is the mean of the values of its part of the run; a line is scaled between its own
smallest and largest value.
"""

from __future__ import annotations

import textwrap

import numpy as np

from titanlite.runtime.errors import printable
from titanlite.tools.report.facts import differences, findings, table
from titanlite.tools.report.run_data import Column, Run

WIDTH = 80
LABEL = 22
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"
CURVES = {
    "loss": ("training loss", "{:.4g}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "lr": ("learning rate", "{:.2e}"),
    "tps_global": ("positions per second", "{:,.0f}"),
    "mfu": ("MFU, %", "{:.1f}"),
    "memory_gib": ("memory, GiB", "{:.2f}"),
    "noise_scale": ("noise scale", "{:.3g}"),
    "expert_load": ("expert load", "{:.2f}"),
    "router_loss": ("router loss", "{:.4g}"),
}
LAST_EVENTS = 10


def text_report(runs: list[Run], blocks: bool = True) -> str:
    """The report of all runs, and the settings in which they differ."""
    lines = list[str]()
    for run in runs:
        title = printable(run.name)[:WIDTH]
        lines += [title, "=" * len(title), ""]
        for name, value in table(run):
            lines += _row(name, value)
        lines += ["", *_curves(run, blocks), ""]
        for finding in findings(run):
            lines += textwrap.wrap(
                printable(finding), WIDTH, initial_indent="* ", subsequent_indent="  "
            )
        lines += ["", *_events(run)]
    if len(runs) > 1:
        differing = differences(runs)
        if differing["rows"]:
            lines += [differing["title"], ""]
        for key, *values in differing["rows"]:
            lines += _row(key, "  |  ".join(values))
    return "\n".join(lines).rstrip()


def _row(name: str, value: str) -> list[str]:
    """A name and its value, wrapped beside it; a name that is too long has lines of its own."""
    name = printable(name)
    width = LABEL
    if LABEL - 2 < len(name) < 40:
        width = len(name) + 2
    first, *others = textwrap.wrap(printable(value), WIDTH - width) or [""]
    indent = " " * width
    if len(name) < width:
        lines = [f"{name:<{width}}{first}"]
    else:
        lines = [*textwrap.wrap(name, WIDTH), indent + first]
    return lines + [indent + text for text in others]


def _curves(run: Run, blocks: bool) -> list[str]:
    """A line for each column with at least two values: first value, blocks, last value."""
    names = [name for name in CURVES if name in run.columns]
    losses = [
        name for name in run.columns if name.startswith("validation/") and name.endswith("/loss")
    ]
    names += losses[:4]
    lines = []
    for name in names:
        column = run.columns[name]
        if len(column.values) < 2:
            continue
        if name in CURVES:
            label, form = CURVES[name]
        else:
            label = name.replace("validation/", "validation, ").removesuffix("/loss")
            form = "{:.4g}"
        start = form.format(column.values[0])
        end = form.format(column.values[-1])
        width = WIDTH - LABEL - 2 - max(9, len(start)) - max(9, len(end))
        line = sparkline(column, width, blocks)
        lines.append(f"{printable(label)[: LABEL - 1]:<{LABEL}}{start:>9} {line} {end}")
    return lines


def sparkline(column: Column, width: int, blocks: bool = True) -> str:
    """`width` characters from the first step to the last; a space where nothing was logged."""
    first = float(column.steps[0])
    last = float(column.steps[-1])
    fractions = (column.steps - first) / (last - first)
    places = np.minimum((fractions * width).astype(int), width - 1)  # the last step too
    counts = np.bincount(places, minlength=width)
    means = np.bincount(places, column.values, width) / np.maximum(counts, 1)
    low = means[counts > 0].min()
    high = means[counts > 0].max()
    signs = BLOCKS if blocks else ASCII
    heights = np.zeros(width)
    # Means of equal values differ in their last digits
    if high - low > 1e-9 * max(abs(high), abs(low)):
        heights = (means - low) / (high - low) * (len(signs) - 1)
    line = ""
    for height, count in zip(heights.tolist(), counts.tolist(), strict=True):
        line += signs[round(height)] if count else " "
    return line


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
