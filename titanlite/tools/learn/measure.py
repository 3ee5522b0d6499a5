"""Runs a step's program on one rank and measures it: losses, collectives and memory.

What it is: runs the program's `train` under the planner's recorder, which sees every operator that
reaches the device. `read_step` and `update` of `common.py`, which every step calls, also note the
gradient norm and what is in memory between two steps.
Why it is here: the same counting that `titanlite plan` shows; a learner's program is graded by what
it does, not by how it is written. Only tensors count, not the memory of the process.
What it costs: about 50 microseconds per operator. It runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import reprlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from titanlite.distributed.mesh import Mesh
from titanlite.tools.plan.recorder import Recorder

HELD_AT = 3  # step: AdamW has its state after the first


@dataclass
class Measured:
    """The figures of one rank: losses and norms of all steps, the others of the recorded ones.

    `calls` and `bytes` are by kind of collective. Bytes are those of the whole tensor: the output
    of an all-gather, the input of a reduce-scatter.
    """

    losses: list[float]
    norms: list[float]
    calls: dict[str, int]
    bytes: dict[str, int]
    held: int = 0  # bytes of tensors when the third step begins
    peak: int = 0


class ProgramError(Exception):
    """A program does not have the form that an exercise needs."""


class NoAxes:
    """Stands for a mesh, since the programs make their own groups."""

    def __init__(self) -> None:
        self.degrees: dict[str, int] = {}
        self.ep = 1

    def axes_of_groups(self) -> dict[str, tuple[str, int]]:
        return {}


def load_program(path: Path) -> ModuleType:
    """Imports a program from a path; it finds the other programs in its folder."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def as_number(value: object, what: str) -> float:
    """Returns a number as it is; raises ProgramError for another value: a `return` is missing."""
    try:
        return float(cast(Any, value))
    except (TypeError, ValueError, RuntimeError):
        message = f"{what}: expected a number, found {reprlib.repr(value)}; is a `return` missing?"
        raise ProgramError(message) from None


def losses_of(path: str) -> list[float]:
    """The losses that a program computes on this rank."""
    losses: list[float] = load_program(Path(path)).train()
    return losses


def measure(path: str, recorded: tuple[int, ...]) -> Measured:
    """Runs a program on this rank, whose process group exists.

    Records only these steps and what comes before the first step, since recording is slow.
    """
    recorder = Recorder(cast(Mesh, NoAxes()), vocab_size=-1)
    norms: list[float] = []
    held = 0
    recording = True
    sys.path.insert(0, str(Path(path).parent))
    common: Any = importlib.import_module("common")
    read_step: Callable[..., Any] = common.read_step
    update: Callable[..., None] = common.update

    def noted_read_step(step: int) -> Any:
        nonlocal held, recording
        if step == HELD_AT:
            time.sleep(0.05)  # gloo's threads may still hold what they have just communicated
            held = sum(recorder.held.values())
        if recording and step not in recorded:
            recorder.__exit__(None, None, None)
        if not recording and step in recorded:
            recorder.__enter__()
        recording = step in recorded
        return read_step(step)

    def noted_update(optimizer: Any, norm: Any, step: int) -> None:
        norms.append(as_number(norm, f"the norm that `update` is given in step {step}"))
        update(optimizer, norm, step)

    common.read_step = noted_read_step
    common.update = noted_update
    program = load_program(Path(path))
    if not hasattr(program, "train"):
        raise ProgramError(f"{Path(path).name}: no function `train`, which the exercise came with")
    recorder.__enter__()
    returned = program.train()
    if recording:
        recorder.__exit__(None, None, None)
    if not isinstance(returned, list):
        raise ProgramError(f"`train` returned {reprlib.repr(returned)}, expected a list of losses")
    losses = [as_number(loss, f"loss of step {i}") for i, loss in enumerate(returned, start=1)]
    calls: dict[str, int] = {}
    sent: dict[str, int] = {}
    for key, value in recorder.counts.items():
        if key[0] in ("calls", "bytes"):
            counts = calls if key[0] == "calls" else sent
            kind = str(key[2])
            counts[kind] = counts.get(kind, 0) + value
    if not recorder.peaks:
        raise ProgramError("`train` made no tensor in the recorded steps, expected a training run")
    peak = max(sum(memory.values()) for memory in recorder.peaks.values())
    return Measured(losses, norms, calls, sent, held, peak)
