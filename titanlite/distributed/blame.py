"""Whom the others wait for: the judgement of the watchdog, without its threads.

What it is: what a process reports (`Heartbeat`), and from the heartbeats of all, who is to blame for a run that stands
still (`Diagnosis`). First those that are silent; then those that have begun the fewest phases, for as long as those may
take; of several of these, the ones that do not wait inside a collective.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PERIOD, TICK = 1.0, 0.25  # seconds between beats, and between looks at the clocks
SILENT = 3 * PERIOD  # without a beat for so long a process is not taken for a living one
PACKAGE = Path(__file__).resolve().parents[1]
DEBUGGERS = ("bdb", "pdb", "pydevd")


@dataclass(frozen=True)
class Heartbeat:
    """What a process tells of itself."""

    rank: int
    node: str  # processes of one node can kill each other
    host: str
    pid: int
    number: int = 0
    progress: int = 0  # phases begun
    phase: str = '"preparing the data"'
    limit: float = math.inf  # seconds the phase may stand still
    key: str = ""  # the config's name for `limit`
    still: float = 0.0  # seconds without progress
    waiting: int = 0  # 0: in code of ours or anybody's, 1: somewhere in torch, 2: in torch.distributed
    place: str = ""  # file:line of ours, once it stands still
    left: bool = False  # it has finished its loop
    verdict: dict[str, Any] = field(default_factory=dict)  # rank 0's, a `Diagnosis`

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Diagnosis:
    """Why the run ends, which ranks say so, one on each node, and which (node, pid) are to be killed."""

    message: str
    speakers: list[int]
    frozen: list[tuple[str, int]]


Beats = dict[int, tuple[Heartbeat, float]]  # rank -> its newest beat and the seconds since it came


def diagnose_silence(beats: Beats, own: Heartbeat, folder: Path) -> Diagnosis | None:
    """Names the processes without a sign of life, if this one waits too: a broken store is no reason to end a run."""
    silent = [
        (beat, age)
        for beat, age in beats.values()
        # Preparing may take for ever, silence while another waits may not.
        if not beat.left and age > max(SILENT, min(beat.limit, own.limit)) and own.still > own.limit - SILENT
    ]
    if not silent:
        return None
    names = _listed([f"{beat.name}, last heard in {beat.phase}" for beat, _ in silent])
    first, age = silent[0]
    key = first.key if first.limit <= own.limit else own.key
    message = f"{names}: frozen or gone, no sign of life for {age:.0f} s ({key}); the run ends; stacks: {folder}"
    frozen = [(beat.node, beat.pid) for beat, _ in silent]
    return Diagnosis(message, _speakers(beats, own, {beat.rank for beat, _ in silent}), frozen)


def diagnose_progress(beats: Beats, own: Heartbeat, folder: Path) -> Diagnosis | None:
    """Names the processes that have come least far, if that is longer ago than their phase may take.

    Among equals, those that do not wait in a collective. `beats` are those of all processes.
    """
    present = [beat for _, (beat, _) in sorted(beats.items()) if not beat.left]
    if any(age > SILENT for beat, age in beats.values() if not beat.left):
        return None  # who is silent may be the cause
    least = min(beat.progress for beat in present)
    behind = [beat for beat in present if beat.progress == least]
    if any(beat.still <= beat.limit for beat in behind):
        return None
    active = min(beat.waiting for beat in behind)
    named = [beat for beat in behind if beat.waiting == active]
    first = max(named, key=lambda beat: beat.still)
    who = f"all {len(beats)} ranks, " if len(named) == len(beats) > 1 else ""
    names = _listed([f"{beat.name} at {beat.place}" for beat in named])
    stacks = folder / f"rank-{first.rank}.txt" if len(named) == 1 else folder
    still = f"standing still in {first.phase} for {first.still:.0f} s ({first.key})"
    message = f"{who}{names}: {still}; the run ends; stacks: {stacks}"
    return Diagnosis(message, _speakers(beats, own, set()), [])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _speakers(beats: Beats, own: Heartbeat, silent: set[int]) -> list[int]:
    """The first living rank of each node, as far as this process knows them."""
    if own.rank:  # rank 0 is silent, and the others know of each other only what torchrun says
        neighbours = own.node == beats[0][0].node
        return [own.rank] if int(os.environ.get("LOCAL_RANK", own.rank)) == int(neighbours) else []
    first: dict[str, int] = {}
    for rank, (beat, _) in sorted(beats.items()):
        if rank not in silent and not beat.left:
            first.setdefault(beat.node, rank)
    return list(first.values())


def locate(frame: FrameType) -> tuple[int, str, bool]:
    """(waiting as in Heartbeat, file:line of ours, whether a debugger holds it) of a thread's innermost frame."""
    place, modules, current = "", [], frame
    while current is not None:
        modules.append(str(current.f_globals.get("__name__", "")))
        path = Path(current.f_code.co_filename)
        beside = path.is_relative_to(PACKAGE.parent) and "site-packages" not in path.parts  # train.py, in a clone
        if beside or path.is_relative_to(PACKAGE):
            place = f"{path.relative_to(PACKAGE.parent)}:{current.f_lineno}"
            break
        current = current.f_back  # type: ignore[assignment]
    debugged = any(module.partition(".")[0] in DEBUGGERS for module in modules)
    if any(module.startswith("torch.distributed") for module in modules):
        return 2, place, debugged
    return int(modules[0].startswith("torch")), place or f"{frame.f_code.co_filename}:{frame.f_lineno}", debugged
