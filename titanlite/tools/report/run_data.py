"""Reads what a run left in its folder: metrics, events, samples and settings.

What it is: `read_run` reads metrics.jsonl, evaluations.jsonl, events.jsonl, samples.jsonl and
config.toml. What is not there is skipped, since the run may be young; damaged lines are skipped and
counted in `notes`. A folder may come from another machine, so it is not trusted: only regular files
are read, of a file beyond the limits below only its end, and of events and samples the newest.
What it costs: 16 bytes of memory per number, and about 3 s per 100,000 rows of 22 columns.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.observe.metrics_file import EVALUATIONS, LONGEST
from titanlite.runtime.documents import parse_json, read_toml
from titanlite.runtime.errors import printable, reason_of

MOST_BYTES = 1 << 31  # of metrics.jsonl
MOST_COLUMNS = 4096  # seven measures of each of 126 layers are 882
MOST_EVENTS = 20_000
MOST_SAMPLES = 20_000
LARGEST = 1 << 53  # a step or a number of tokens beyond it is damage, and no float has it exactly

UNKNOWN = -1  # the step of an event that names none
ENDS = ("end", "diverged")  # events that a process writes when it ends


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl."""

    time: float  # seconds since 1970
    step: int
    name: str
    text: str
    # A start has model, device and layout; an end has `finished`
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Text that the model generated during training."""

    step: int
    prompt: str
    text: str


@dataclass
class Column:
    """The finite values of a column in the order of their steps, each step once."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class Run:
    """The content of a run's folder."""

    folder: Path
    columns: dict[str, Column] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)  # steps whose loss was not finite
    events: list[Event] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # section.key -> value
    notes: list[str] = field(default_factory=list)  # what could not be read
    parts: int = 1  # how many parts of the folder's path are in the name

    @property
    def name(self) -> str:
        """The last parts of the folder's path; see `read_runs`."""
        return printable("/".join(self.folder.parts[-self.parts :])) or "/"

    @property
    def last_step(self) -> int:
        """The last step of the metrics or events, 0 if there is none."""
        steps = [event.step for event in self.events]
        steps += [int(column.steps[-1]) for column in self.columns.values()]
        return max(steps, default=0)

    def column(self, name: str) -> Column:
        """A column, empty if the run has none of this name."""
        return self.columns.get(name) or Column(np.empty(0, np.int64), np.empty(0))


def read_runs(folders: list[Path]) -> list[Run]:
    """Reads different folders.

    If two have the same name, the names get as many last parts of the path as differ.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        others = [other.folder.parts for other in runs if other.folder != run.folder]
        for count in range(1, len(run.folder.parts) + 1):
            run.parts = count
            if all(other[-count:] != run.folder.parts[-count:] for other in others):
                break
    return runs


def read_run(folder: Path) -> Run:
    """Reads a run's folder. Raises nothing: what cannot be read is in `notes`."""
    run = Run(folder.resolve())
    readers: dict[str, Callable[[Path, Run], None]] = {
        "metrics.jsonl": _read_metrics,
        EVALUATIONS: _read_evaluations,
        "events.jsonl": _read_events,
        "samples.jsonl": _read_samples,
        "config.toml": _read_config,
    }
    for name, read in readers.items():
        try:
            read(folder / name, run)
        except FileNotFoundError:
            if name == "metrics.jsonl":
                run.notes.append("no metrics.jsonl: nothing has been logged yet")
        except OSError as error:
            run.notes.append(f"{name}: {error.strerror or error}")
    return run


def _objects(path: Path, run: Run, most_bytes: int) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's lines; a note says how many lines were damaged.

    Raises OSError.
    """
    damaged = 0
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not os.path.isfile(file.fileno()):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
        size = os.fstat(file.fileno()).st_size  # a run may append lines while this one is read
        unread = min(size, most_bytes)
        if size > most_bytes:  # the end, from the next line on
            file.seek(size - most_bytes)
            unread -= len(file.readline())
        while unread > 0:
            line = file.readline(LONGEST)
            if not line:
                break
            unread -= len(line)
            try:
                value = parse_json(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            elif unread > 0 or line.endswith(b"\n"):  # else the last line may be half written
                damaged += 1
    if damaged == 1:
        run.notes.append(f"{path.name}: 1 damaged line was skipped")
    elif damaged:
        run.notes.append(f"{path.name}: {damaged} damaged lines were skipped")
    if size > most_bytes:
        run.notes.append(f"{path.name}: only its last {most_bytes / 1e9:.1f} GB were read")


def _step_of(row: dict[str, Any]) -> int | None:
    step = row.get("step")
    if type(step) is int and 0 <= step < LARGEST:
        return step
    return None


def _read_metrics(path: Path, run: Run) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for row in _objects(path, run, MOST_BYTES):
            step = _step_of(row)
            # JSON has no NaN; the loss of a step without targets is null, but not broken
            if step is not None and row.get("loss", 0.0) is None and row.get("targets") != 0:
                run.broken.append(step)
            yield row

    run.columns = _columns(rows())


def _read_evaluations(path: Path, run: Run) -> None:
    """Reads evaluations; those of the averaged weights become columns evaluate_ema/..."""

    def results() -> Iterator[dict[str, Any]]:
        for row in _objects(path, run, 1 << 26):
            prefix = "evaluate_ema/" if row.get("weights") == "ema" else "evaluate/"
            result: dict[str, Any] = {"step": row.get("step")}
            for name, value in row.items():
                if name.startswith("evaluate/"):
                    result[prefix + name.removeprefix("evaluate/")] = value
            yield result

    run.columns |= _columns(results())


def _columns(rows: Iterator[dict[str, Any]]) -> dict[str, Column]:
    """The finite numbers of rows with a step, by name."""
    arrays: dict[str, tuple[array[int], array[float]]] = {}  # steps and values of each column
    for row in rows:
        step = _step_of(row)
        if step is None:
            continue
        for name, value in row.items():
            if type(value) not in (int, float) or name == "step" or not -1e300 < value < 1e300:
                continue
            if name not in arrays:
                if len(arrays) == MOST_COLUMNS:
                    continue
                arrays[name] = (array("q"), array("d"))
            steps, values = arrays[name]
            steps.append(step)
            values.append(value)
    return {name: _ordered(steps, values) for name, (steps, values) in arrays.items()}


def _ordered(steps: array[int], values: array[float]) -> Column:
    """Sorts the values by step. A step that was written twice keeps its last value."""
    s = np.frombuffer(steps, np.int64)
    v = np.frombuffer(values, np.float64)
    if len(s) > 1 and not (np.diff(s) > 0).all():
        order = np.argsort(s, kind="stable")
        s = s[order]
        v = v[order]
        last = np.append(np.diff(s) > 0, True)
        s = s[last]
        v = v[last]
    return Column(s, v)


def _read_events(path: Path, run: Run) -> None:
    events = deque[Event](maxlen=MOST_EVENTS)
    for row in _objects(path, run, 1 << 26):
        time = row.get("time")
        name = row.get("event")
        text = row.get("text")
        about = row.get("about")
        step = _step_of(row)
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e11:
            continue
        if not isinstance(name, str) or not isinstance(text, str):
            continue
        if not isinstance(about, dict):
            about = {}
        if step is None:
            step = UNKNOWN
        events.append(Event(float(time), step, name[:40], " ".join(text.split())[:500], about))
    run.events = _with_restarts(_with_steps(list(events)))


def _with_steps(events: list[Event]) -> list[Event]:
    """Replaces steps that are UNKNOWN.

    A signal does not know its step. It gets the step of the save or the end that follows at once.
    If another event follows, the process was killed before it had saved; then the largest step so
    far counts.
    """
    result = list[Event]()
    largest = 0
    for i, event in enumerate(events):
        step = event.step
        following = events[i + 1 : i + 2]
        if step == UNKNOWN and following and following[0].name in ("save", *ENDS):
            step = following[0].step
        if step == UNKNOWN:
            step = largest
        largest = max(largest, step)
        result.append(dataclasses.replace(event, step=step))
    return result


def _with_restarts(events: list[Event]) -> list[Event]:
    """Adds a restart before each start that follows a start without an end."""
    result = list[Event]()
    running = False
    for event in events:
        if event.name == "start":
            if running:
                lost = (
                    "the process before ended without a message: it was killed, failed with "
                    "an error, or hung"
                )
                place = len(result)
                if result[-1].name == "resume":  # a process resumes, then says that it starts
                    place -= 1
                result.insert(place, Event(event.time, event.step, "restart", lost))
            running = True
        elif event.name in ENDS:
            running = False
        result.append(event)
    return result


def _read_samples(path: Path, run: Run) -> None:
    samples = deque[Sample](maxlen=MOST_SAMPLES)
    for row in _objects(path, run, 1 << 26):
        step = _step_of(row)
        prompt = row.get("prompt")
        text = row.get("text")
        if step is not None and isinstance(prompt, str) and isinstance(text, str):
            samples.append(Sample(step, prompt[:2000], text[:4000]))
    run.samples = list(samples)


def _read_config(path: Path, run: Run) -> None:
    try:
        tables = read_toml(path)
    except ValueError as error:
        run.notes.append(f"config.toml: {reason_of(error)}")
        return
    for section, keys in tables.items():
        if not isinstance(keys, dict):
            continue
        for name, value in keys.items():
            run.config[f"{section}.{name}"] = value


def finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
