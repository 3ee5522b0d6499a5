"""Hang diagnosis: which rank blocks the others.

What it is: `Heartbeat`, the state that each process reports, and `diagnose`, which finds the
blocking ranks. Ranks without heartbeats are to blame first: a frozen process sends none, and
neither does a host that is down. Otherwise it names the ranks that have begun the fewest phases,
and among these the ones whose main thread is not inside a collective, where it would be waiting
for other ranks.
Why it is here: when one process stops, all others wait in a collective until it times out, and each
error message then names a different neighbour.
Limit: with a GPU the host runs ahead, so the rank that has begun the fewest phases may itself wait
for its GPU. The flight recorder in each rank's report shows which collectives its GPU has not
entered.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from titanlite.runtime.documents import parse_json
from titanlite.runtime.typed_json import typed

SILENT = 3.0  # seconds: a process without a heartbeat for longer may be frozen
PACKAGE = Path(__file__).resolve().parents[1]
TIMED = "titanlite.observe.waits"  # its frame lies between the caller and each wait
# Modules that wait for other ranks. `wait` of a message has no frame of torch
WAITING = (
    TIMED,
    "torch.distributed",
    "titanlite.distributed.agreement",
    "titanlite.parallel.pipeline_parallel",
)
DEBUGGERS = ("bdb", "pdb", "pydevd")

# Where the main thread stands still
IN_PYTHON = 0
IN_TORCH = 1
FOR_RANKS = 2


@dataclass(frozen=True)
class Heartbeat:
    """The state of a process. Times are in seconds."""

    rank: int
    host: str
    pid: int
    clock: float = 0.0  # the sender's clock, which differs between heartbeats
    progress: int = 0  # number of phases begun
    phase: str = '"preparing the data"'
    limit: float = math.inf  # how long the phase may stand still
    key: str = ""  # the config key of the limit
    still: float = 0.0  # how long it has stood still
    waiting: int = IN_PYTHON  # where the main thread stands still
    place: str = ""  # file:line in this repository, once it stands still
    silent: bool = False  # set by the reader: no heartbeat has arrived for SILENT
    diagnosis: Diagnosis | None = None  # rank 0's, for all ranks to follow

    @property
    def name(self) -> str:
        name = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        if self.place:
            return f"{name} at {self.place}"
        return name

    def aged(self, age: float, reader: Heartbeat) -> Heartbeat:
        """Returns this heartbeat as it counts `age` seconds after the reader received it."""
        if age <= SILENT:
            return self
        # Preparing has no limit, but silence always has the reader's
        shorter = min(self, reader, key=lambda beat: beat.limit)
        return replace(self, silent=True, still=age, limit=shorter.limit, key=shorter.key)


@dataclass(frozen=True)
class Diagnosis:
    """The reason why the run ends, and the frozen ranks."""

    message: str
    frozen: list[int]

    def speaker(self, node: range) -> int:
        """Returns the rank that prints the message on a node: the first that is not frozen."""
        return next((rank for rank in node if rank not in self.frozen), node[0])


def diagnose(heartbeats: list[Heartbeat], own: Heartbeat, folder: Path) -> Diagnosis | None:
    """Names the ranks that block the run, or returns None while they may take longer.

    Rank 0 passes the heartbeats of all; the other ranks pass rank 0's and their own, and judge only
    its silence.
    """
    blocking: list[Heartbeat] = []
    silent = [beat for beat in heartbeats if beat.silent]
    if silent:
        # Otherwise this rank makes progress, and only the connection to the store is broken
        if own.still > own.limit - SILENT:
            blocking = [beat for beat in silent if beat.still > beat.limit]
    elif own.rank == 0:
        # The fewest phases begun; among equals, those that do not wait for other ranks
        last = min((beat.progress, beat.waiting) for beat in heartbeats)
        candidates = [beat for beat in heartbeats if (beat.progress, beat.waiting) == last]
        if all(beat.still > beat.limit for beat in candidates):
            blocking = candidates
    if not blocking:
        return None
    longest = max(blocking, key=lambda beat: beat.still)
    names = ", ".join(beat.name for beat in blocking[:8])
    if len(blocking) > 8:
        names += f" and {len(blocking) - 8} more"
    problem = "no progress"
    if longest.silent:
        problem = "frozen or gone, no heartbeat"
    message = (
        f"{names}: {problem} for {longest.still:.0f} s in {longest.phase} "
        f"({longest.key} = {longest.limit:.0f}); the run ends; stacks: {folder}"
    )
    return Diagnosis(message, [beat.rank for beat in blocking if beat.silent])


class Location(NamedTuple):
    """The place where a thread is."""

    waiting: int  # IN_PYTHON, IN_TORCH or FOR_RANKS
    place: str  # file:line of the innermost frame in this repository
    debugged: bool  # a debugger holds it


def locate(frame: FrameType) -> Location:
    """Finds where a thread is, from its innermost frame."""
    modules = []
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    for current, line in traceback.walk_stack(frame):
        modules.append(str(current.f_globals.get("__name__", "")))
        path = Path(current.f_code.co_filename)
        # In a clone, train.py is beside the package
        in_clone = path.is_relative_to(PACKAGE.parent) and "site-packages" not in path.parts
        if (in_clone or path.is_relative_to(PACKAGE)) and modules[-1] != TIMED:
            place = f"{path.relative_to(PACKAGE.parent)}:{line}"
            break
    waiting = IN_PYTHON
    if any(module.startswith(WAITING) for module in modules):
        waiting = FOR_RANKS
    elif modules[0].startswith("torch"):
        waiting = IN_TORCH
    debugged = any(module.partition(".")[0] in DEBUGGERS for module in modules)
    return Location(waiting, place, debugged)


def read_heartbeat(content: bytes) -> Heartbeat | None:
    """Parses a heartbeat from the store; None, as if none had arrived, if it is not valid.

    Another version of titanlite or other software may write to the store. An invalid heartbeat must
    not end the thread that watches for hangs.
    """
    try:
        return typed(Heartbeat, parse_json(content))
    except ValueError:
        return None
