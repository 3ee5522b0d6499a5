"""What a report says in words: the final table, the findings, and how the settings differ.

What it is: functions from a `Run` and its `Trend` to strings. The page and the text for a terminal
show the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from titanlite.config.schema import Config
from titanlite.observe.console import duration
from titanlite.tools.report.charts import evaluation_columns, validation_sets
from titanlite.tools.report.fit import THRESHOLD, Trend
from titanlite.tools.report.run_data import Run, finite

MOST_FOUND = 12  # spikes, and plateaus, that are listed
EVENTS = (
    "start",
    "resume",
    "save",
    "signal",
    "spike",
    "skip",
    "rollback",
    "diverged",
    "restart",
    "end",
)
PLACES = ("run.name", "run.folder")  # say where a run is, not how it trains


def table(run: Run) -> list[tuple[str, str]]:
    """The final table: name and value of what is known."""
    about = next((event.about for event in reversed(run.events) if event.name == "start"), {})
    rows = [("state", state(run)), ("steps", _steps(run)), ("tokens", _last(run, "tokens", short))]
    rows += [("training loss", _training_loss(run)), *_validation(run), *_evaluations(run)]
    rows += [
        ("tokens per second", _median(run, "tps_global", "{:,.0f}")),
        ("TFLOPS per device", _median(run, "tflops", "{:.3g}")),
        ("MFU", _median(run, "mfu", "{:.1f}%")),
        ("peak memory", _largest(run, ("memory_max_gib", "memory_gib"), "{:.2f} GiB")),
        ("time in steps", _last(run, "seconds", duration)),
        ("time from first to last event", _wall(run)),
        ("checkpoints saved", _count(run, "save")),
        ("restarts after a failure", _count(run, "restart")),
        ("rollbacks", _count(run, "rollback")),
        (
            "steps skipped",
            _last(run, "bad_steps", "{:,.0f}".format) if "bad_steps" in run.columns else "",
        ),
        ("model", str(run.config.get("model.flavor", ""))),
        ("parameters", f"{about['parameters']:,}" if type(about.get("parameters")) is int else ""),
        ("batch", _batch(run)),
    ]
    rows += [(name, str(about.get(name, ""))[:200]) for name in ("device", "layout", "torch")]
    return [(name, value) for name, value in rows if value]


def state(run: Run) -> str:
    """Whether the run has ended, as far as its events say."""
    ends = [event for event in run.events if event.name in ("start", "end", "diverged")]
    if not ends:
        return "unknown: written before there were events, or not begun"
    if ends[-1].name == "diverged":
        return "ended: training has diverged"
    if ends[-1].name == "end":
        older = ends[-1].text.startswith("done")  # of a version whose events do not say it
        return "finished" if ends[-1].about.get("finished", older) else "stopped, can be resumed"
    return "running, or ended without a message: it was killed, failed with an error, or hung"


def _steps(run: Run) -> str:
    total = run.config.get("training.steps")
    return f"{run.last_step:,}" + (f" of {total:,}" if type(total) is int and total else "")


def _last(run: Run, name: str, form: Any) -> str:
    values = run.column(name).values
    return str(form(float(values[-1]))) if len(values) else ""


def _median(run: Run, name: str, form: str) -> str:
    # The first row has the first step, which allocates and compiles
    values = run.column(name).values[1:]
    return form.format(float(np.median(values))) if len(values) else ""


def _largest(run: Run, names: tuple[str, ...], form: str) -> str:
    values = [run.column(name).values.max() for name in names if name in run.columns]
    return form.format(float(values[0])) if values else ""


def _training_loss(run: Run) -> str:
    values = run.column("loss").values
    if not len(values):
        return ""
    last = min(20, max(1, len(values) // 10))
    mean = f" (mean of the last {last} rows {values[-last:].mean():.4f})" if last > 1 else ""
    return f"{values[-1]:.4f}{mean}"


def _validation(run: Run) -> list[tuple[str, str]]:
    rows = []
    sets = validation_sets([run])
    for name in [""] * ("validation/loss" in run.columns) + sets:
        prefix = f"validation/{name}".rstrip("/")
        column = run.column(f"{prefix}/loss")
        label = f", {name or 'mean'}" if len(sets) > 1 else ""
        if len(column.values):
            best = int(column.values.argmin())
            last = float(column.values[-1])
            rows.append((f"validation loss{label}", f"{last:.4f}"))
            rows.append(
                (
                    f"best validation loss{label}",
                    f"{column.values[best]:.4f} at step {column.steps[best]:,}",
                )
            )
            rows.append((f"perplexity{label}", f"{math.exp(min(last, 700)):,.2f}"))
        rows.append(
            (f"bits per byte{label}", _last(run, f"{prefix}/bits_per_byte", "{:.4f}".format))
        )
    return rows


def _evaluations(run: Run) -> list[tuple[str, str]]:
    """The newest result of each metric of `titanlite evaluate`, with its standard error and step."""
    rows = []
    for name, label in evaluation_columns([run]).items():
        column = run.columns[name]
        error = run.column(f"{name}_stderr").values
        shown = f"{column.values[-1]:.4f}" + (f" ± {error[-1]:.4f}" if len(error) else "")
        rows.append((f"evaluated: {label}", f"{shown} at step {column.steps[-1]:,}"))
    return rows


def _wall(run: Run) -> str:
    return duration(run.events[-1].time - run.events[0].time) if len(run.events) > 1 else ""


def _count(run: Run, name: str) -> str:
    count = sum(event.name == name for event in run.events)
    return f"{count:,}" if count else ""


def _batch(run: Run) -> str:
    sequences = run.config.get("training.global_batch_size")
    length = run.config.get("training.seq_len")
    return (
        f"{sequences:,} sequences of {length:,} tokens"
        if type(sequences) is type(length) is int
        else ""
    )


def findings(run: Run, found: Trend) -> list[str]:
    """What the loss curve shows, one sentence or two for each finding."""
    lines = []
    law = found.law
    if law:
        low, high = law.exponents
        range_ = f"{low:.2g} to {high:.2g} (and E from {law.floors[0]:.3g} to {law.floors[1]:.3g})"
        lines.append(
            f"Power law: loss = E + A s^-b with E = {law.floor:.4g}, A = {law.scale:.4g}, b = {law.exponent:.3g}, of "
            f"{law.count:,} logged steps from {law.first:,} to {law.last:,}; the robust standard deviation of the "
            f"loss around it is {law.noise:.2g}. With b from {range_} the fit has a "
            f"sum of deviations at most 10% larger."
        )
        for spike in found.spikes[:MOST_FOUND]:
            where = (
                f"step {spike.first:,}"
                if spike.first == spike.last
                else f"steps {spike.first:,} to {spike.last:,}"
            )
            lines.append(
                f"Spike at {where}: a loss of {spike.value:.4g}, {spike.z:,.1f} robust standard deviations above the "
                f"local median, after the trend was removed."
            )
        more = len(found.spikes) - MOST_FOUND
        lines += [f"{more} more spikes."] if more > 0 else []
        lines += (
            []
            if found.spikes
            else [f"No spike: no loss is {THRESHOLD:g} robust standard deviations too high."]
        )
        for flat in found.plateaus[:MOST_FOUND]:
            lines.append(
                f"Plateau from step {flat.first:,} to {flat.last:,}: the loss fell by {flat.fall:.3g} (standard error "
                f"{flat.error:.1g}); the power law of the steps before it predicts {flat.expected:.3g}."
            )
        if found.judged and not found.plateaus:
            lines.append(
                "No plateau: wherever the trend predicts a fall larger than the noise, the loss fell."
            )
        elif not found.judged:
            lines.append(
                "Plateaus cannot be distinguished from noise: the predicted fall is too small everywhere."
            )
    else:
        lines.append(
            f"No trend: {found.why}. Spikes and plateaus cannot be distinguished from noise."
        )
    if run.broken:
        lines.append(
            f"The loss was not finite in {len(run.broken):,} rows, first at step {run.broken[0]:,}."
        )
    return lines + [f"{note}." for note in run.notes]


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
        for section, keys_ in dataclasses.asdict(Config()).items()
        for name, value in keys_.items()
    }
    shown = [(key, _shown(runs[0].config[key]), _shown(defaults.get(key))) for key in keys]
    rows = [list(row) for row in shown if row[1] != row[2]]
    return {
        "title": "Settings other than the defaults",
        "head": ["key", "value", "default"],
        "rows": rows,
    }


def _shown(value: Any) -> str:
    if value is None:
        return "not there"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shown(entry) for entry in value)[:300] + "]"
    if type(value) is float or (type(value) is int and abs(value) < 1 << 53):
        return f"{value:g}" if finite(value) and float(f"{value:g}") == value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)[:300]


def short(number: float) -> str:
    """Three or four digits, with k, M, B or T."""
    for unit in ("", "k", "M", "B"):
        if abs(number) < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}T"
