"""Writes the text beside a trace: the kernels with most time, and communication not hidden.

What it is: sums over the events of a recording. Communication is not hidden while a collective is
in progress and the device (on a CPU: the computing threads of this process) does nothing else. Its
time is the length of the union of the collectives' intervals minus the union of all computing
intervals.
On CUDA the intervals are those of kernels. On a CPU they are those of gloo's collectives and of
torch's operators; an operator's interval and time exclude the operators that it calls. Operators
that only launch or await a collective are left out, as are labels (`record_function`) and the
autograd engine, in which hooks may wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

Interval = tuple[float, float]
ROWS = 25
COLLECTIVES = ("nccl", "gloo:")  # first letters of kernels' and operators' names
LEFT_OUT = ("c10d::", "_c10d_functional::", "autograd::engine::", "ProfilerStep")


def summary(events: Iterable[FunctionEvent], steps: int) -> str:
    """Writes tables for a recording of `steps` steps. Times are per step, in milliseconds."""
    events = list(events)
    kernels = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    times: dict[str, list[Interval]] = defaultdict(list)
    calls: dict[str, int] = defaultdict(int)
    for event in kernels or events:
        # gloo's collectives are annotations
        label = event.is_user_annotation and not is_collective(event.name)
        if label or event.name.startswith(LEFT_OUT):
            continue
        calls[event.name] += 1
        if kernels:
            times[event.name].append(interval(event))
        else:
            times[event.name] += own_intervals(event)

    computing: list[Interval] = []
    communicating: list[Interval] = []
    for name, intervals in times.items():
        if is_collective(name):
            communicating += intervals
        else:
            computing += intervals
    busy = covered(computing)
    spent = {name: length(intervals) for name, intervals in times.items()}
    ordered = sorted(spent, key=lambda name: -spent[name])
    total = sum(spent.values()) or 1.0
    steps = max(1, steps)

    def line(microseconds: float, second: str, num_calls: str, name: str) -> str:
        milliseconds = microseconds / 1e3 / steps
        return f"{milliseconds:10.3f}  {second:>10}  {num_calls:>10}  {name[:100]}"

    def per_step(name: str) -> str:
        return f"{calls[name] / steps:.1f}"

    def not_hidden(union: list[Interval]) -> str:
        return f"{length(without(union, busy)) / 1e3 / steps:.3f}"

    kind = "operator"
    if kernels:
        kind = "kernel"
    lines = [f"{'ms/step':>10}  {'share':>10}  {'calls/step':>10}  {kind}"]
    for name in ordered[:ROWS]:
        lines.append(line(spent[name], f"{spent[name] / total:.1%}", per_step(name), name))
    others = ordered[ROWS:]
    if others:
        time = sum(spent[name] for name in others)
        lines.append(line(time, f"{time / total:.1%}", "", f"{len(others)} more"))
    lines += ["", f"{'ms/step':>10}  {'not hidden':>10}  {'calls/step':>10}  collective"]
    for name in ordered:
        if is_collective(name):
            union = covered(times[name])
            lines.append(line(length(union), not_hidden(union), per_step(name), name))
    union = covered(communicating)
    lines.append(line(length(union), not_hidden(union), "", "all, counted once"))
    return "\n".join(lines) + "\n"


def is_collective(name: str) -> bool:
    return name.lower().startswith(COLLECTIVES)


def interval(event: FunctionEvent) -> Interval:
    return event.time_range.start, event.time_range.end


def own_intervals(event: FunctionEvent) -> list[Interval]:
    """Returns the interval of an operator minus those of the operators that it calls."""
    return without([interval(event)], covered([interval(child) for child in event.cpu_children]))


def covered(intervals: list[Interval]) -> list[Interval]:
    """Computes the union of intervals: sorted, and without overlaps."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Subtracts `others` from `intervals`; both must be unions, as `covered` returns them."""
    remaining: list[Interval] = []
    first = 0  # index of the first of `others` that ends after the present interval begins
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        i = first
        while i < len(others) and others[i][0] < end:
            other_start, other_end = others[i]
            if other_start > start:
                remaining.append((start, other_start))
            start = max(start, other_end)
            i += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
