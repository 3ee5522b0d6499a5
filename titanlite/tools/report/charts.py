"""The charts of a report: which columns are drawn, with which titles and units.

What it is: `charts` returns plain data, for JSON: a list of charts, each with its series, whose
points are thinned so that the whole page stays below a megabyte. A chart without a value is left
out. Columns of single layers or blocks, such as `gradient_norm/layers.3`, make a chart for each
measure, of a single run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.tools.report.run_data import Column, Run
from titanlite.tools.report.thin import evenly, extremes, means, numbers

BYTES = 600_000  # of all points, at about 15 bytes each
MOST_POINTS = 1000  # of a series
LEAST_POINTS = 60
MOST_LINES = 8  # of a chart of layers
MOST_EVALUATIONS = 60  # metrics of all sets together
# Columns time/..., from the bottom of the stack up
SPLIT = ("data", "forward", "backward", "communication", "optimizer", "other")


@dataclass(frozen=True)
class Line:
    """A column in a chart. `smooth` is a smoothed line over a faint one of all values."""

    column: str
    label: str
    style: str = "line"


@dataclass(frozen=True)
class Chart:
    section: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    help: str = ""
    log: bool = False  # whether a logarithmic axis is offered
    single: bool = False  # left out for several runs, which would have too many lines


CHARTS = (
    Chart("Speed", "Throughput", "positions/s", (Line("tps_global", "all devices", "smooth"),)),
    Chart("Speed", "Model FLOPs utilisation", "%", (Line("mfu", "MFU", "smooth"),)),
    Chart("Speed", "TFLOPS per device", "TFLOPS", (Line("tflops", "TFLOPS", "smooth"),)),
    Chart(
        "Speed",
        "Time of a step",
        "s",
        (
            Line("step_seconds_p50", "median"),
            Line("step_seconds_p95", "95th percentile"),
            Line("step_seconds_max", "longest"),
        ),
        "of the steps since the row before",
        log=True,
    ),
    Chart(
        "Speed",
        "Waiting for data",
        "%",
        (Line("data_wait_percent", "share of the time", "smooth"),),
    ),
    Chart(
        "Speed",
        "Ranks",
        "s",
        (
            Line("slowest_rank_seconds", "slowest rank"),
            Line("fastest_rank_seconds", "fastest rank"),
        ),
        "time of a step without waiting for other ranks",
    ),
    Chart(
        "Speed",
        "Validation and saving",
        "s",
        (
            Line("time/validation", "validation", "points"),
            Line("time/checkpoint", "checkpoint", "points"),
        ),
        "time beside the steps, since the row before",
    ),
    Chart(
        "Memory",
        "Memory",
        "GiB",
        (
            Line("memory_gib", "peak of rank 0"),
            Line("memory_max_gib", "peak of the largest rank"),
            Line("memory_reserved_gib", "reserved"),
            Line("memory_allocated_gib", "allocated"),
            Line("host_memory_gib", "host"),
        ),
    ),
    Chart("Memory", "GPU utilisation", "%", (Line("gpu_utilisation", "rank 0", "smooth"),)),
    Chart("Optimisation", "Learning rate", "", (Line("lr", "learning rate"),), log=True),
    Chart(
        "Optimisation",
        "Gradient norm",
        "",
        (Line("grad_norm", "before clipping", "smooth"),),
        log=True,
    ),
    Chart(
        "Optimisation",
        "Gradient noise scale",
        "tokens",
        (Line("noise_scale", "noise scale"),),
        "batches much larger than it help little",
        log=True,
    ),
    Chart(
        "Optimisation",
        "Load of the experts",
        "",
        (Line("expert_load", "highest of all blocks", "smooth"),),
        "tokens of the expert that is chosen most often, divided by the mean; 1 is balanced",
    ),
    Chart(
        "Optimisation",
        "Auxiliary loss of the router",
        "",
        (Line("router_loss", "without its coefficient", "smooth"),),
    ),
    Chart(
        "Optimisation",
        "Distance from the median",
        "robust z",
        (Line("loss_z", "loss", "smooth"), Line("grad_norm_z", "gradient norm", "smooth")),
        "as the guard of [stability] saw it",
    ),
)
SECTIONS = ("Loss", "Evaluation", "Optimisation", "Speed", "Memory", "Data", "Layers")
LAYERS = {
    "gradient_norm": "Gradient norm of each layer",
    "weight_norm": "Weight norm of each layer",
    "update_ratio": "Update over weight of each layer",
    "activation_mean": "Mean activation of each block",
    "activation_rms": "Root mean square of activations",
    "activation_max": "Largest activation of each block",
    "attention_logit": "Largest attention logit of each block",
    "expert_load": "Load of the experts of each block, most over mean",
}


def charts(runs: list[Run]) -> list[dict[str, Any]]:
    """The charts that have data, in the order in which they are shown."""
    wanted = [
        _loss_chart(runs),
        *_validation_charts(runs),
        *CHARTS,
        *_data_charts(runs),
        *_layer_charts(runs),
    ]
    wanted += _evaluation_charts(runs)
    chosen = [chart for chart in wanted if not chart.single or len(runs) == 1]
    if all("mfu" in run.columns for run in runs):
        chosen = [chart for chart in chosen if chart.title != "TFLOPS per device"]  # the same curve
    chosen.sort(key=lambda chart: SECTIONS.index(chart.section))
    count = sum(line.column in run.columns for run in runs for c in chosen for line in c.lines)
    most = int(np.clip(BYTES / 15 / max(1, count), LEAST_POINTS, MOST_POINTS))
    result: list[dict[str, Any]] = []
    for chart in chosen:
        if chart.title == "Time of a step":  # its parts stand before it
            several = len(runs) > 1
            result += [_time_split(i, run, most, several) for i, run in enumerate(runs)]
        result.append(_drawn(chart, runs, most))
    with_data = [chart for chart in result if chart["series"]]
    return [chart | {"id": f"chart-{i}"} for i, chart in enumerate(with_data)]


def _drawn(chart: Chart, runs: list[Run], most: int) -> dict[str, Any]:
    """A chart with its points."""
    series = [
        {
            "run": number,
            "label": line.label,
            "style": line.style,
            **_points(run.columns[line.column], line.style, most),
        }
        for number, run in enumerate(runs)
        for line in chart.lines
        if line.column in run.columns
    ]
    return {
        "section": chart.section,
        "title": chart.title,
        "unit": chart.unit,
        "help": chart.help,
        "log": chart.log and all(min(one["y"]) > 0 for one in series),
        "kind": "lines",
        "series": series,
    }


def _points(column: Column, style: str, most: int) -> dict[str, Any]:
    """x and y of a series, and for a thinned smooth one the means of its buckets, mx and my."""
    x, y = extremes(column.steps, column.values, most)
    points = {"x": numbers(x, 15), "y": numbers(y)}
    if style == "smooth" and len(x) < len(column.steps):
        mx, my = means(column.steps, column.values, most // 2)
        points |= {"mx": numbers(mx, 8), "my": numbers(my)}
    return points


def _loss_chart(runs: list[Run]) -> Chart:
    """Training and validation loss in one chart: the gap between them shows overfitting."""
    lines = [Line("loss", "training", "smooth")]
    mean = any("validation/loss" in run.columns for run in runs)
    if mean:
        lines.append(Line("validation/loss", "validation, mean of all sets", "points"))
    if not mean or len(runs) == 1:
        lines += [
            Line(f"validation/{name}/loss", f"validation, {name}", "points")
            for name in validation_sets(runs)
        ]
    return Chart("Loss", "Loss", "nats per token", tuple(lines), log=True)


def validation_sets(runs: list[Run]) -> list[str]:
    """The names in `validation/<set>/loss`."""
    names: list[str] = []
    for run in runs:
        for column in run.columns:
            match = re.fullmatch(r"validation/(.+)/loss", column)
            if match and match[1] not in names:
                names.append(match[1])
    return names[:MOST_LINES]


def _validation_charts(runs: list[Run]) -> list[Chart]:
    sets = validation_sets(runs)
    bits = tuple(Line(f"validation/{name}/bits_per_byte", name, "points") for name in sets)
    averaged = tuple(
        Line(f"validation/{name}/ema_loss", f"{name}, averaged weights", "points") for name in sets
    )
    plain = tuple(Line(f"validation/{name}/loss", name, "points") for name in sets)
    help = "can be compared across tokenizers"
    found = [Chart("Loss", "Validation, bits per byte", "", bits, help)]
    if any(line.column in run.columns for run in runs for line in averaged):
        found.append(
            Chart("Loss", "Validation of averaged weights", "nats per token", plain + averaged)
        )
    return found


def evaluation_columns(runs: list[Run]) -> dict[str, str]:
    """Column -> label, for the metrics of `titanlite evaluate`: evaluate/<set>/<metric>.

    Numbers of tokens are left out.
    """
    labels: dict[str, str] = {}
    for run in runs:
        for column in run.columns:
            match = re.fullmatch(r"evaluate(_ema)?/(.+)/(.+)", column)
            if match is None:
                continue
            averaged, set_name, metric = match.groups()
            if metric == "tokens":
                continue
            labels[column] = f"{set_name}, {metric}"
            if averaged:
                labels[column] += " (averaged weights)"
    return dict(list(labels.items())[:MOST_EVALUATIONS])


def _evaluation_charts(runs: list[Run]) -> list[Chart]:
    """A chart for each metric that some run has of several steps, with a line for each set."""
    groups: dict[str, list[Line]] = {}
    for name, label in evaluation_columns(runs).items():
        if any(len(run.column(name).steps) > 1 for run in runs):
            set_name, _, metric = label.partition(", ")
            groups.setdefault(metric, []).append(Line(name, set_name, "points"))
    return [
        Chart("Evaluation", metric, "", tuple(lines[:MOST_LINES]))
        for metric, lines in groups.items()
    ]


def _data_charts(runs: list[Run]) -> list[Chart]:
    names = {name for run in runs for name in run.columns if name.startswith("epochs/")}
    if not names:
        return []
    chosen = sorted(names)[:MOST_LINES]
    lines = tuple(Line(name, name.removeprefix("epochs/")) for name in chosen)
    return [Chart("Data", "Passes over the text", "epochs", lines)]


def _layer_charts(runs: list[Run]) -> list[Chart]:
    """A chart for each measure of layers, with MOST_LINES layers if there are more."""
    result = list[Chart]()
    for prefix, title in LAYERS.items():
        names = [name for name in runs[0].columns if name.startswith(f"{prefix}/")]
        chosen = [names[i] for i in evenly(len(names), MOST_LINES)]
        lines = tuple(Line(name, name.partition("/")[2]) for name in chosen)
        help = f"{len(chosen)} of {len(names)}" if len(chosen) < len(names) else ""
        result.append(
            Chart("Layers", title, "", lines, help, log=prefix != "activation_mean", single=True)
        )
    return result


def _time_split(number: int, run: Run, most: int, several: bool) -> dict[str, Any]:
    """The stacked parts of a step's time, one chart for each run.

    All parts are taken from the same rows, so that they add up.
    """
    parts = [name for name in SPLIT if f"time/{name}" in run.columns]
    steps = run.column(f"time/{parts[0]}").steps if parts else np.empty(0, np.int64)
    chosen = evenly(len(steps), most // 2)
    series = []
    for name in parts:
        column = run.column(f"time/{name}")
        y = np.interp(steps[chosen], column.steps, column.values)
        series.append(
            {
                "run": number,
                "label": name,
                "style": "area",
                "x": numbers(steps[chosen], 15),
                "y": numbers(y),
            }
        )
    return {
        "section": "Speed",
        "title": f"Time of a step by part, {run.name}" if several else "Time of a step by part",
        "unit": "s",
        "help": "rank 0, mean of the steps since the row before",
        "log": False,
        "kind": "stack",
        "series": series,
    }


def axis(run: Run, most: int = 400) -> dict[str, list[float]]:
    """Steps with their tokens and hours of training; the page interpolates between them."""
    tokens = run.column("tokens")
    seconds = run.column("seconds")
    if not len(tokens.steps):
        return {"step": [0, max(1, run.last_step)], "tokens": [], "hours": []}
    chosen = evenly(len(tokens.steps), most)
    steps = np.append(0, tokens.steps[chosen])
    hours = np.interp(steps, np.append(0, seconds.steps), np.append(0.0, seconds.values)) / 3600
    return {
        "step": numbers(steps, 15),
        "tokens": numbers(np.append(0, tokens.values[chosen]), 9),
        "hours": numbers(hours, 7),
    }
