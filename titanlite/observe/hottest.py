"""The text beside a trace: which kernels took most time, and how long communication was not hidden.

What it is: sums over the events of a recording. Communication is not hidden while a collective is
in progress and the device (on a CPU: the threads of this process that compute) does nothing else.
So it is the length of the union of the collectives' intervals, without the part that the union of
all computing intervals covers.
On CUDA the intervals are those of kernels. On a CPU they are those of gloo's collectives and of
torch's operators; an operator's interval, like its time, is without the operators that it calls.
What only launches a collective or waits for one is left out, as are labels (`record_function`) and
the autograd engine, in whose time hooks may wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[float, float]
ROWS = 25
COLLECTIVES = ("nccl", "gloo:")  # how the names of kernels and operators begin
LEFT_OUT = ("c10d::", "_c10d_functional::", "autograd::engine::", "ProfilerStep")


def summary(events: Iterable[Any], steps: int) -> str:
    """Tables for a recording of `steps` steps. Times are per step, in milliseconds."""
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
        if not label and not event.name.startswith(LEFT_OUT):
            times[event.name] += [interval(event)] if kernels else own_intervals(event)
            calls[event.name] += 1
    collectives = [name for name in times if is_collective(name)]
    busy = covered(
        [part for name, parts in times.items() if not is_collective(name) for part in parts]
    )
    whole = covered([part for name in collectives for part in times[name]])
    spent = {name: length(parts) for name, parts in times.items()}
    ordered = sorted(spent, key=lambda name: -spent[name])
    total = sum(spent.values()) or 1.0
    steps = max(1, steps)

    def line(first: float, second: str, number: str, name: str) -> str:
        return f"{first / 1e3 / steps:10.3f}  {second:>10}  {number:>10}  {name[:100]}"

    def exposed(parts: list[Interval]) -> str:
        return f"{length(without(covered(parts), busy)) / 1e3 / steps:.3f}"

    lines = [
        f"{'ms/step':>10}  {'share':>10}  {'calls/step':>10}  {'kernel' if kernels else 'operator'}"
    ]
    lines += [
        line(spent[n], f"{spent[n] / total:.1%}", f"{calls[n] / steps:.1f}", n)
        for n in ordered[:ROWS]
    ]
    rest = ordered[ROWS:]
    if rest:
        seconds = sum(spent[name] for name in rest)
        lines.append(line(seconds, f"{seconds / total:.1%}", "", f"{len(rest)} more"))
    lines += ["", f"{'ms/step':>10}  {'not hidden':>10}  {'calls/step':>10}  collective"]
    for name in sorted(collectives, key=lambda name: -spent[name]):
        lines.append(
            line(
                length(covered(times[name])),
                exposed(times[name]),
                f"{calls[name] / steps:.1f}",
                name,
            )
        )
    lines.append(line(length(whole), exposed(whole), "", "all, counted once"))
    return "\n".join(lines) + "\n"


def is_collective(name: str) -> bool:
    return name.lower().startswith(COLLECTIVES)


def interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def own_intervals(event: Any) -> list[Interval]:
    """The interval of an operator without those of the operators that it calls."""
    return without([interval(event)], covered([interval(child) for child in event.cpu_children]))


def covered(intervals: list[Interval]) -> list[Interval]:
    """The union of intervals: sorted, and without overlaps."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The parts of `intervals` that no interval of `others` covers; both are unions as `covered`
    returns them.
    """
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
