"""Phases of a run: the main thread's current activity, for the watchdog and for step times.

What it is: components call `mark_phase` where a phase begins; it lasts until the next mark. The
watchdog listens, to distinguish progress from a hang, and names the phase in its message.
`StepTimes` listens too, and adds the time between two marks to a part of the step.
Why it is here: all properties of a phase are in one table, so a reworded text changes no column of
metrics.jsonl, and no phase can lack a property.
What it costs: a call per listener and mark, under a microsecond on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

# First line: parts of a step; second line: outside of steps
Part: TypeAlias = Literal[
    "data", "forward", "backward", "communication", "optimizer", "other",
    "validation", "checkpoint", "pause",
]  # fmt: skip


class Traits(NamedTuple):
    """The properties of a phase, in the order of the parameters of `Phase`."""

    text: str
    part: Part = "other"
    in_step: bool = False
    on_host: bool = False
    times_only: bool = False


class Phase(Enum):
    """All phases, with their properties.

    text: its name in messages.
    part: the part of a step that its time is added to.
    in_step: it belongs to a training step, and has the shorter time-out of steps.
    on_host: it does not wait for a GPU, so CPU time means progress.
    times_only: the watchdog does not count it. The hang diagnosis counts all other phases, so all
    ranks must mark them in the same order.
    """

    # Set-up
    BUILD_MODEL = Traits("building the model")
    LOAD = Traits("loading")
    IMPORT_SINKS = Traits("importing the libraries of metrics.sinks", on_host=True)

    # A step
    READ_DATA = Traits("reading data", "data", in_step=True)
    FORWARD_BACKWARD = Traits("forward and backward", "forward", in_step=True)
    FORWARD = Traits("forward", "forward", times_only=True)  # a pipeline's microbatch
    BACKWARD = Traits("backward", "backward", times_only=True)
    WAIT_FOR_STAGING = Traits("waiting for the copy of the state")
    UPDATE = Traits("update", "optimizer", in_step=True)
    COLLECT_GARBAGE = Traits("garbage collection", in_step=True, on_host=True)
    START_TIMING = Traits("start of timing", times_only=True)  # previous steps are logged

    # Between steps
    PAUSE = Traits("pause", "pause", times_only=True)  # until validation or saving begins
    VALIDATE = Traits("validation", "validation")
    SAMPLE = Traits("sampling", "validation")
    SAVE = Traits("saving", "checkpoint", on_host=True)
    COPY_STATE = Traits("copying the state", "checkpoint")
    DELETE_CHECKPOINTS = Traits("deleting old checkpoints")
    MEASURE_ACTIVATIONS = Traits("measuring activations")
    PROFILE = Traits("profiling", "pause")  # writes a trace, on some ranks
    CLOSE_SINKS = Traits("sending the last metrics", on_host=True)

    def __init__(
        self, text: str, part: Part, in_step: bool, on_host: bool, times_only: bool
    ) -> None:
        self.text = text
        self.part = part
        self.in_step = in_step
        self.on_host = on_host
        self.times_only = times_only


Listener: TypeAlias = Callable[[Phase], None]
listeners: list[Listener] = []


def mark_phase(phase: Phase) -> None:
    """Marks the start of a phase of the main thread, for all listeners."""
    for listener in listeners:
        listener(phase)


def add_listener(listener: Listener) -> None:
    """Makes `mark_phase` call `listener` with each phase, until it is removed."""
    listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Removes a listener. Raises ValueError if it was not added."""
    listeners.remove(listener)
