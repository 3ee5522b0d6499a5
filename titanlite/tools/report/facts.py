"""The words of a report: the final table, the findings, and the settings that differ.

What it is: functions from a `Run` to strings. The page and the text for a terminal show the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from titanlite.config.schema import Config
from titanlite.observe.console import duration
from titanlite.tools.report.charts import evaluation_columns, validation_sets
from titanlite.tools.report.loss_curve import (
    FEWEST,
    THRESHOLD,
    WINDOW,
    Improvement,
    Spike,
    find_spikes,
    improvement,
)
from titanlite.tools.report.run_data import Run, finite

MOST_FOUND = 12  # spikes that are listed
PLACES = ("run.name", "run.folder")  # say where a run is, not how it trains


def table(run: Run) -> list[tuple[str, str]]:
    """The final table: names and values that are known."""
    starts = [event.about for event in run.events if event.name == "start"]
    about = starts[-1] if starts else {}
    parameters = about.get("parameters")
    rows = [("state", state(run)), ("steps", _steps(run)), ("tokens", _last(run, "tokens", short))]
    rows += [("training loss", _training_loss(run)), *_validation(run), *_evaluations(run)]
    rows += [
        ("positions per second", _median(run, "tps_global", "{:,.0f}")),
        ("TFLOPS per device", _median(run, "tflops", "{:.3g}")),
        ("MFU", _median(run, "mfu", "{:.1f}%")),
        ("peak memory", _largest(run, ("memory_max_gib", "memory_gib"), "{:.2f} GiB")),
        ("time in steps", _last(run, "seconds", duration)),
        ("time from first to last event", _wall(run)),
        ("checkpoints saved", _count(run, "save")),
        ("restarts after a failure", _count(run, "restart")),
        ("rollbacks", _count(run, "rollback")),
        ("steps skipped", _last(run, "bad_steps", "{:,.0f}".format)),
        ("model", str(run.config.get("model.flavor", ""))),
        ("parameters", f"{parameters:,}" if type(parameters) is int else ""),
        ("batch", _batch(run)),
    ]
    rows += _expert_load(run)
    rows += [(name, str(about.get(name, ""))[:200]) for name in ("device", "layout", "torch")]
    return [(name, value) for name, value in rows if value]


def state(run: Run) -> str:
    """Whether the run has ended, as far as its events say."""
    events = [event for event in run.events if event.name in ("start", "end", "diverged")]
    if not events:
        return "unknown: it has no events"
    last = events[-1]
    if last.name == "diverged":
        return "ended: training has diverged"
    if last.name == "end":
        return "finished" if last.about.get("finished") else "stopped, can be resumed"
    return "running, or ended without a message: it was killed, failed with an error, or hung"


def _steps(run: Run) -> str:
    total = run.config.get("training.steps")
    if type(total) is int and total:
        return f"{run.last_step:,} of {total:,}"
    return f"{run.last_step:,}"


def _last(run: Run, name: str, form: Callable[[float], str]) -> str:
    """The last value of a column; "" if the run has none."""
    values = run.column(name).values
    return form(float(values[-1])) if len(values) else ""


def _median(run: Run, name: str, form: str) -> str:
    """The median of a column without its first row, whose step allocates and compiles."""
    values = run.column(name).values[1:]
    return form.format(float(np.median(values))) if len(values) else ""


def _largest(run: Run, names: tuple[str, ...], form: str) -> str:
    values = [run.column(name).values.max() for name in names if name in run.columns]
    return form.format(float(values[0])) if values else ""


def _training_loss(run: Run) -> str:
    values = run.column("loss").values
    if not len(values):
        return ""
    count = min(20, max(1, len(values) // 10))
    if count == 1:
        return f"{values[-1]:.4f}"
    mean = values[-count:].mean()
    return f"{values[-1]:.4f} (mean of the last {count} rows {mean:.4f})"


def _validation(run: Run) -> list[tuple[str, str]]:
    """The mean of all sets, if it was logged, and each set."""
    sets = validation_sets([run])
    prefixes = [(name, f"validation/{name}") for name in sets]
    if "validation/loss" in run.columns:
        prefixes.insert(0, ("mean", "validation"))
    rows = []
    for name, prefix in prefixes:
        label = f", {name}" if len(sets) > 1 else ""
        column = run.column(f"{prefix}/loss")
        if len(column.values):
            best = int(column.values.argmin())
            last = float(column.values[-1])
            lowest = f"{column.values[best]:.4f} at step {column.steps[best]:,}"
            perplexity = math.exp(min(last, 700))  # of more, exp overflows
            rows.append((f"validation loss{label}", f"{last:.4f}"))
            rows.append((f"best validation loss{label}", lowest))
            rows.append((f"perplexity{label}", f"{perplexity:,.2f}"))
        bits = _last(run, f"{prefix}/bits_per_byte", "{:.4f}".format)
        rows.append((f"bits per byte{label}", bits))
    return rows


def _evaluations(run: Run) -> list[tuple[str, str]]:
    """The newest result of each metric of `titanlite evaluate`, with its step."""
    rows = []
    for name, label in evaluation_columns([run]).items():
        column = run.columns[name]
        result = f"{column.values[-1]:.4f}"
        rows.append((f"evaluated: {label}", f"{result} at step {column.steps[-1]:,}"))
    return rows


def _expert_load(run: Run) -> list[tuple[str, str]]:
    """The last load of the experts of each block: the most chosen one's tokens over the mean; first
    the highest of all blocks, then each block's.
    """
    prefix = "expert_load/layers."
    blocks = sorted(
        int(name.removeprefix(prefix))
        for name in run.columns
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    )
    loads = [float(run.column(f"{prefix}{block}").values[-1]) for block in blocks]
    if not loads:
        return []
    highest = max(loads)
    where = f"{highest:.2f} in layers.{blocks[loads.index(highest)]}"
    each = ", ".join(f"{block}: {load:.2f}" for block, load in zip(blocks, loads, strict=True))
    return [("expert load, most/mean", where), ("expert load by block", each)]


def _wall(run: Run) -> str:
    if len(run.events) < 2:
        return ""
    return duration(run.events[-1].time - run.events[0].time)


def _count(run: Run, name: str) -> str:
    count = sum(event.name == name for event in run.events)
    return f"{count:,}" if count else ""


def _batch(run: Run) -> str:
    sequences = run.config.get("training.global_batch_size")
    length = run.config.get("training.seq_len")
    if type(sequences) is not int or type(length) is not int:
        return ""
    return f"{sequences:,} sequences of {length:,} tokens"


def findings(run: Run) -> list[str]:
    """Sentences about the loss curve and about what could not be read."""
    loss = run.column("loss")
    lines = [_improvement_sentence(improvement(loss.steps, loss.values))]
    lines += _spike_sentences(find_spikes(loss.steps, loss.values), len(loss.steps))
    if run.broken:
        count = len(run.broken)
        first = run.broken[0]
        lines.append(f"The loss was not finite in {count:,} rows, first at step {first:,}.")
    return lines + [f"{note}." for note in run.notes]


def _improvement_sentence(found: Improvement | None) -> str:
    if found is None:
        return f"Too few logged losses to compare: the comparison needs {2 * FEWEST}."
    last = found.last
    before = found.before
    verb = "fell" if found.fall >= 0 else "rose"
    return (
        f"The mean loss {verb} by {abs(found.fall):.3g} (standard error {found.error:.1g}): "
        f"{last.value:.4f} in the last {last.count:,} logged steps, {last.first:,} to "
        f"{last.last:,}; {before.value:.4f} in the {before.count:,} before them, "
        f"{before.first:,} to {before.last:,}."
    )


def _spike_sentences(spikes: list[Spike], count: int) -> list[str]:
    """The spikes among `count` logged losses."""
    if count <= WINDOW:
        return [f"Too few logged losses to recognise a spike: each needs {WINDOW} before it."]
    if not spikes:
        return [
            f"No spike: no loss is {THRESHOLD:g} robust standard deviations above the {WINDOW} "
            "before it."
        ]
    lines = []
    for spike in spikes[:MOST_FOUND]:
        where = f"step {spike.first:,}"
        if spike.last > spike.first:
            where = f"steps {spike.first:,} to {spike.last:,}"
        lines.append(
            f"Spike at {where}: a loss of {spike.value:.4g}, {spike.z:,.1f} robust standard "
            f"deviations above the median of the {WINDOW} losses before it."
        )
    if len(spikes) > MOST_FOUND:
        lines.append(f"{len(spikes) - MOST_FOUND} more spikes.")
    return lines


def differences(runs: list[Run]) -> dict[str, Any]:
    """The settings in which the runs differ; of a single run, those that are not the defaults."""
    keys = sorted({key for run in runs for key in run.config if key not in PLACES})
    if len(runs) > 1:
        values = {key: [_shown(run.config.get(key)) for run in runs] for key in keys}
        rows = [[key, *row] for key, row in values.items() if len(set(row)) > 1]
        return {
            "title": "Settings that differ",
            "head": ["key", *(run.name for run in runs)],
            "rows": rows,
        }
    defaults = {
        f"{section}.{name}": value
        for section, entries in dataclasses.asdict(Config()).items()
        for name, value in entries.items()
    }
    changed = []
    for key in keys:
        value = _shown(runs[0].config[key])
        default = _shown(defaults.get(key))
        if value != default:
            changed.append([key, value, default])
    return {
        "title": "Settings other than the defaults",
        "head": ["key", "value", "default"],
        "rows": changed,
    }


def _shown(value: object) -> str:
    """A setting as text of bounded length."""
    if value is None:
        return "not there"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shown(entry) for entry in value)[:300] + "]"
    if isinstance(value, bool):
        return str(value).lower()
    # Larger integers have no exact float
    if type(value) is float or (type(value) is int and abs(value) < 1 << 53):
        short_form = f"{value:g}"
        exact = finite(value) and float(short_form) == value
        return short_form if exact else str(value)
    return str(value)[:300]


def short(number: float) -> str:
    """Three or four digits, with k, M, B or T."""
    for unit in ("", "k", "M", "B"):
        if abs(number) < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}T"
