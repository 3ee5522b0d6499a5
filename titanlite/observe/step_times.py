"""Step times: measures the time of each phase of a step from marks.

What it is: components mark the phases of a step for the watchdog (`mark_phase`). Here each mark
gets a time: on CPU from the clock, on CUDA by an event in the computation's stream, which the
device passes when it has finished the work queued before it. The time between two marks belongs to
the phase of the first, so the phases of a step add up to the step. A wait for other ranks is part
of its phase; with `metrics.rank_waits`, `waits.py` adds a mark before and after it. The columns of
a logged step are means per step since the last logged step; docs/measures.md describes them.
Why it is here: tokens per second show that a run is slow. The phases show the cause: data,
communication, one rank.
What it costs: a mark takes under a microsecond on CPU, and on CUDA the recording of an event; the
host waits for none. A logged step has one all-reduce of 16 bytes per rank.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

import torch

from titanlite.config.schema import MetricsConfig
from titanlite.observe.memory import memory_columns, peak_memory_gib
from titanlite.observe.ranks import compare_ranks
from titanlite.runtime.phases import Phase, add_listener, remove_listener

PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")  # parts of a step
BESIDE = ("validation", "checkpoint", "pause")  # outside of steps
# With more marks than this, those that the device has passed are summed before the next log
MOST_MARKS = 1000


class HostClock:
    """The host's clock, in seconds."""

    now = staticmethod(time.perf_counter)

    def in_use(self) -> bool:
        """Whether the current call runs in the computation's stream: always, since a CPU has no
        other.
        """
        return True

    def reached(self, at: float, wait: bool) -> bool:
        return True

    def between(self, a: float, b: float) -> float:
        return b - a

    def release(self, at: float) -> None:
        pass


class EventClock:
    """CUDA events in the computation's stream as a clock; `release` allows their reuse."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def in_use(self) -> bool:
        """Whether the current call runs in the computation's stream.

        FSDP communicates in other streams.
        """
        return torch.cuda.current_stream(self.device) == self.stream

    def reached(self, at: torch.cuda.Event, wait: bool) -> bool:
        """Whether the device has passed the event; with `wait` the host waits until it has."""
        if wait:
            at.synchronize()
        return wait or at.query()

    def between(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        return a.elapsed_time(b) / 1000

    def release(self, at: torch.cuda.Event) -> None:
        self._free.append(at)


class Window:
    """The time between two logged steps: seconds of each part, and of each step without the
    parts outside of steps.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PARTS, *BESIDE), 0.0)
        # The first step begins with the window, and includes the end of the log call before it
        self.steps = [0.0]
        self.begun = 0  # steps begun

    def begin_step(self) -> None:
        if self.begun:
            self.steps.append(0.0)
        self.begun += 1

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        if part not in BESIDE:
            self.steps[-1] += seconds

    def columns(self) -> dict[str, float]:
        """Returns seconds per step; for the parts outside of steps, total seconds."""
        count = self.begun
        ordered = sorted(self.steps)

        def percentile(percent: int) -> float:
            return ordered[math.ceil(percent / 100 * count) - 1]

        return {
            "step_seconds": sum(ordered) / count,
            "step_seconds_p50": percentile(50),
            "step_seconds_p95": percentile(95),
            "step_seconds_max": ordered[-1],
            **{f"time/{part}": self.seconds[part] / count for part in PARTS},
            **{f"time/{part}": self.seconds[part] for part in ("checkpoint", "validation")},
        }

    @property
    def work(self) -> float:
        """Returns the seconds per step in which this rank did not wait for others."""
        return sum(self.seconds[part] for part in PARTS if part != "communication") / self.begun


class Mark(NamedTuple):
    """A time at which a phase, a wait, or the rest of a phase after a wait begins."""

    part: str  # gets the time until the next mark
    phase: Phase | None  # None: a wait begins or ends
    time: Any  # a value of the clock


class StepTimes:
    """Collects this process's marks from now on; without `metrics.step_times` none.

    One per process; all ranks construct it together. Waits for other ranks are marked after
    `time_waits` (`waits.py`), with `metrics.rank_waits`.
    """

    def __init__(self, config: MetricsConfig, device: torch.device) -> None:
        self.enabled = config.step_times
        self.has_waits = config.step_times and config.rank_waits
        self.device = device
        self.clock: HostClock | EventClock = HostClock()
        if device.type == "cuda":
            self.clock = EventClock(device)
        self.window = Window()  # ended by the last START_TIMING
        self._next = self.window  # the window after it
        self._marks: list[Mark] = []  # marks not added up yet
        self._last: Mark | None = None  # the last mark added up
        self._part = "other"
        self._waiting = False
        self._first = True  # whether in the first window, which compiles and is left out
        if self.enabled:
            add_listener(self.mark)

    def close(self) -> None:
        """Stops recording marks."""
        if self.enabled:
            remove_listener(self.mark)

    def mark(self, phase: Phase) -> None:
        """Records that a phase begins."""
        self._part = phase.part
        self._marks.append(Mark(phase.part, phase, self.clock.now()))
        if phase is Phase.READ_DATA and len(self._marks) > MOST_MARKS:
            self._add_up(wait=False)

    def begin_wait(self) -> bool:
        """Records that a wait for other ranks begins. Returns False, and records nothing, if the
        wait does not delay a step.

        These waits delay no step: in validation and saving, within another wait, in a stream
        beside the computation's, and in Python threads other than the main one, as that of
        asynchronous saving. Autograd's threads count, because Python does not start them.
        """
        started_here = type(threading.current_thread()) is threading.Thread
        if started_here or self._waiting or self._part in BESIDE or not self.clock.in_use():
            return False
        self._waiting = True
        self._marks.append(Mark("communication", None, self.clock.now()))
        return True

    def end_wait(self) -> None:
        """Records that the wait is over: the phase in which it began continues."""
        self._marks.append(Mark(self._part, None, self.clock.now()))
        self._waiting = False

    def _add_up(self, wait: bool) -> None:
        """Adds up the time between marks; without `wait` only between marks that the device has
        passed.
        """
        num_passed = 0
        for mark in self._marks:
            if not self.clock.reached(mark.time, wait):
                break
            if self._last is not None:
                seconds = self.clock.between(self._last.time, mark.time)
                self._next.add(self._last.part, seconds)
                self.clock.release(self._last.time)
            if mark.phase is Phase.START_TIMING:
                self.window = self._next
                self._next = Window()
            elif mark.phase is Phase.READ_DATA:
                self._next.begin_step()
            self._last = mark
            num_passed += 1
        del self._marks[:num_passed]

    def columns(self) -> dict[str, Any]:
        """Returns the columns of a logged step, as means since the last one.

        There are none in the first call, or if no step has begun since the last one. All ranks call
        it together.
        """
        if not self.enabled:
            return {}
        self._add_up(wait=True)
        first = self._first
        self._first = False
        if first or not self.window.begun:
            return {}
        row: dict[str, Any] = self.window.columns()
        memory = peak_memory_gib(self.device)
        row |= compare_ranks(self.device, self.window.work, memory, self.has_waits)
        if not self.has_waits:
            del row["time/communication"]
        row |= memory_columns(self.device)
        return row
