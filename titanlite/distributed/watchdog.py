"""Ends a run that hangs, and says which process hangs and where.

What it is: two threads in every process. One writes a beat each second into the store that the process group was joined
through: how far the main loop has come, its phase, and how long it has stood still. The other looks at the clocks.
Rank 0 reads the beats of all, the others only rank 0's, so the traffic is two keys per process and second.
Why it is here: when one process stops, all others wait in a collective until its time-out, and each then blames its
neighbour. The one to blame is silent (frozen, or its host is dead), or is the one whose main loop has come least far.
Every process then writes its stacks into `<run folder>/hang/` and leaves; a frozen one is killed by its neighbours, as
torchrun would wait 30 seconds for it.
What it leaves alone: a process that reads, writes or (on a CPU) computes, and one in a debugger: if others wait for it
in a collective, that one's own time-out ends the run ten seconds after ours would have. And a job that was stopped as a
whole and continued: a clock that jumps is started anew.
What it cannot tell: on a GPU the host runs ahead, so who has come least far may be waiting for its GPU, or for a
collective on it. The flight recorders in the reports then show which collective whose GPU has not entered.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from titanlite.config.schema import EXIT_HUNG, CommConfig
from titanlite.distributed.blame import (
    PERIOD,
    SILENT,
    TICK,
    Diagnosis,
    Heartbeat,
    diagnose_progress,
    diagnose_silence,
    locate,
)
from titanlite.distributed.torch_private import clone_default_store, flight_recorder

# Processor seconds and bytes read or written, per second: with less a process stands still. To rank 0's bytes the store
# adds its own where it is in that process: so many for each process of the run.
WORKS, STORE_BYTES = (0.1, 1e6), 4e3


_running: Watchdog | None = None


def mark_phase(name: str, in_step: bool = False) -> None:
    """The main thread begins something; `in_step`: a part of a training step. Nothing happens without a watchdog."""
    if _running is not None:
        _running.phase(name, _running.progress.step if in_step else 0)


class Watchdog:
    """`phase` says where the main loop is; the rest happens beside it. The last call is `close`."""

    def __init__(self, config: CommConfig, folder: Path, progress: Any, computes_here: bool) -> None:
        """All processes call it together. `computes_here`: on the CPU, not on a device that is waited for."""
        global _running
        _running = self
        self.config, self.folder, self.progress, self.computes_here = config, folder / "hang", progress, computes_here
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        host = socket.gethostname()
        self._own = Heartbeat(self.rank, f"{host}/{os.environ.get('GROUP_RANK', 0)}", host, os.getpid())
        self._mark = (0, self._own.phase, math.inf, "")  # no time-out: texts may be long
        self._step, self._first_step = 0, 0
        self._main = threading.get_ident()
        self._since, self._work = time.monotonic(), self._work_done()
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the newest beat of each rank, and when it came
        self._blind = False  # the store does not answer
        self._closed, self._urgent = threading.Event(), threading.Event()
        self._store = clone_default_store()
        self._store.set(_key(self.rank), json.dumps(asdict(self._own)))
        dist.barrier()  # the beats of all are there: no reader waits for one
        # Two threads: a request to a store whose process is frozen does not come back.
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._talk, self._watch)]
        for thread in self._threads:
            thread.start()

    def phase(self, name: str, step: int = 0) -> None:
        """The main loop begins something. A `step` after the first of this process has the shorter time-out.

        The first step compiles, connects and allocates; saving and validation, which name no step, may take longer too.
        """
        seconds, key = float(self.config.timeout_seconds), "comm.timeout_seconds"
        if step:
            self._step, self._first_step = step, self._first_step or step
            if step > self._first_step and self.config.step_timeout_seconds < seconds:
                seconds, key = float(self.config.step_timeout_seconds), "comm.step_timeout_seconds"
        where = f'"{name}"' + (f" of step {step}" if step else f" after step {self._step}" if self._step else "")
        longer = seconds > self._mark[2]
        self._mark = (self._mark[0] + 1, where, seconds, key)
        if longer:
            self._urgent.set()  # the others hear at once that this may take longer

    def close(self) -> None:
        """The loop is over: what follows has no time-out."""
        global _running
        _running = None
        self._closed.set()
        self._urgent.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)
        dist.barrier()  # nobody's last words meet a store that has gone

    def _talk(self) -> None:
        """Writes this process's beat and reads those of others."""
        others = [rank for rank in range(self.world) if rank != self.rank] if self.rank == 0 else [0]
        number = 0
        while True:
            self._urgent.clear()
            closed, number = self._closed.is_set(), number + 1
            try:
                self._store.set(_key(self.rank), json.dumps(asdict(replace(self._own, number=number, left=closed))))
                values = self._store.multi_get([_key(rank) for rank in others]) if others else []
                self._blind = False
            except RuntimeError:  # the connection broke, which a client does not mend, or the store has gone
                self._blind, values = True, []
                with contextlib.suppress(RuntimeError):
                    self._store = clone_default_store()
            for rank, value in zip(others if values else [], values, strict=True):
                beat = Heartbeat(**json.loads(value))
                if rank not in self._heard or self._heard[rank][0].number != beat.number:
                    self._heard[rank] = (beat, time.monotonic())
            if closed:
                return
            self._urgent.wait(PERIOD)

    def _watch(self) -> None:
        """Looks at the clocks until the loop is over or somebody hangs."""
        last = time.monotonic()
        while not self._closed.wait(TICK):
            now = time.monotonic()
            self._look_at_self(now, now - last)
            if now - last > SILENT:  # this process was stopped, and perhaps the others with it
                self._heard = {rank: (beat, now) for rank, (beat, _) in self._heard.items()}
            last = now
            verdict = self._verdict(now)
            if verdict and not self._closed.is_set():
                self._end(verdict)

    def _look_at_self(self, now: float, passed: float) -> None:
        """Brings the process's own beat up to date."""
        progress, phase, limit, key = self._mark
        before, self._work = self._work, self._work_done()
        seconds, count = (now_done - then for now_done, then in zip(self._work, before, strict=True))
        store = STORE_BYTES * self.world if self.rank == 0 else 0.0
        works = seconds > WORKS[0] * passed or count > (WORKS[1] + store) * passed
        if progress != self._own.progress or works or passed > SILENT:
            self._since = now
        waiting, place, debugged = 0, "", False
        if now - self._since > min(2 * PERIOD, limit / 2):
            waiting, place, debugged = locate(sys._current_frames()[self._main])
        if debugged:
            self._since = now
        still = now - self._since
        if still > limit:
            self._urgent.set()  # the next beat need not wait its second
        self._own = replace(
            self._own, progress=progress, phase=phase, limit=limit, key=key, still=still, waiting=waiting, place=place
        )

    def _work_done(self) -> tuple[float, float]:
        """Processor seconds, where waiting for a device does not take any, and bytes through files (Linux)."""
        fields: dict[str, str] = {}
        with contextlib.suppress(OSError):
            fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        seconds = time.process_time() if self.computes_here else 0.0
        # read_bytes is what a memory map reads from the disk; the others are calls of read and write.
        return seconds, float(sum(int(fields.get(name, 0)) for name in ("rchar", "wchar", "read_bytes")))

    def _verdict(self, now: float) -> Diagnosis | None:
        """Rank 0's where it has come to one, or this process's own."""
        heard = dict(self._heard)
        if self.rank and heard and heard[0][0].verdict:
            return Diagnosis(**heard[0][0].verdict)
        if self.world > 1 and (not heard or (self._blind and self.rank == 0)):
            return None  # the collectives' own time-outs remain
        beats = {rank: (beat, now - when) for rank, (beat, when) in heard.items()} | {self.rank: (self._own, 0.0)}
        verdict = diagnose_silence(beats, self._own, self.folder)
        if self.rank == 0:
            verdict = verdict or diagnose_progress(beats, self._own, self.folder)
        if verdict and self.rank == 0:
            self._own = replace(self._own, verdict=asdict(verdict))
            self._urgent.set()
        return verdict

    def _end(self, verdict: Diagnosis) -> NoReturn:
        """Leaves, after time enough for all to hear of it and to write. Whether the disk still answers is not asked."""
        report = threading.Thread(target=self._report, args=(verdict,), daemon=True)
        report.start()
        time.sleep(PERIOD + 2 * TICK)
        report.join(PERIOD)
        for node, pid in verdict.frozen:
            if node == self._own.node and _parent(pid) in (os.getppid(), None):  # the id may be another's by now
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(EXIT_HUNG)

    def _report(self, verdict: Diagnosis) -> None:
        """Says it, where this process is its node's speaker, and writes what it knows into its file."""
        if self.rank in verdict.speakers:
            print(f"error: {verdict.message}", file=sys.stderr, flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self.rank}.txt").open("w") as file:
            print(f"{verdict.message}\n\n{self._own.name}, {self._own.phase}\n", file=file, flush=True)
            os.dup2(file.fileno(), 2)  # the errors of collectives that break now are no news on the console
            faulthandler.dump_traceback(file=file, all_threads=True)
            print(f"\nflight recorder:\n{flight_recorder()}", file=file, flush=True)
            os.fsync(file.fileno())


def _parent(pid: int) -> int | None:
    """The process that has started it; None where the system does not tell (there is no /proc)."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _key(rank: int) -> str:
    return f"titanlite/beat/{rank}"
