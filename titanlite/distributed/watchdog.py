"""Watchdog: ends a run that hangs, and names the rank that blocks the others and its phase.

What it is: two threads in every process. One writes heartbeats into the store that the process
group was joined through, and reads those of others: rank 0 reads all, the others only rank 0's. The
second watches the clock and calls `diagnose`. When that names a rank, every process writes its
stacks into `<run folder>/hang/` and exits with 124. The launcher kills a frozen process two seconds
later (torchrun, 30 seconds later).
What does not count as standing still: a process that reads, writes, is held in a debugger, or
computes. In phases that may wait for a GPU, CPU time does not count, because waiting takes CPU time
too.
If other ranks wait for it in a collective, that collective's own time-out ends the run, ten seconds
after this one.
What it costs: four small requests to the store per process and second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from titanlite.config.schema import CommConfig
from titanlite.distributed.hang_diagnosis import Diagnosis, Heartbeat, diagnose, locate
from titanlite.distributed.torch_private import clone_default_store, flight_recorder
from titanlite.runtime.errors import EXIT_HUNG

KEY = "titanlite/heartbeat/"
# Seconds between heartbeats, and between looks at the clock
PERIOD = 0.5
TICK = 0.25
_running: Watchdog | None = None
recorder: Callable[[str], None] | None = None  # also gets each mark: `observe/step_times.py`


def mark_phase(
    name: str, in_step: bool = False, on_host: bool = False, times_only: bool = False
) -> None:
    """Marks the start of a phase of the main loop, which lasts until the next mark, for watchdog
    and `recorder`.

    A phase of a training step has the shorter time-out of steps. `on_host`: it does not wait for a
    GPU, so CPU time means progress. All ranks must mark the same phases in the same order, because
    the diagnosis counts them, but for those with `times_only`, which only the recorder gets.
    """
    if recorder is not None:
        recorder(name)
    if _running is not None and not times_only:
        _running.phase(name, in_step, on_host)


class Watchdog:
    """Runs from its construction to `close`.

    All ranks construct and close it together; one per process.
    """

    def __init__(
        self, config: CommConfig, folder: Path, step: Callable[[], int], computes_here: bool
    ) -> None:
        """`step` gives the current step; `computes_here`: the model is on the CPU, where CPU time
        means progress.
        """
        global _running
        self.config = config
        self.folder = folder / "hang"
        self.step = step
        self.computes_here = computes_here
        self._on_host = computes_here
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._marked = self._own = Heartbeat(self.rank, socket.gethostname(), os.getpid())
        self._first_step = 0
        # Seconds this process has run, and when it last made progress
        self._clock = self._since = 0.0
        self._work = self._work_done()
        self._others = (
            [rank for rank in range(self.world_size) if rank != self.rank]
            if self.rank == 0
            else [0]
        )
        if self._others:
            # Not imported by a run of one rank
            from titanlite.distributed.messages import read_heartbeat

            self._read = read_heartbeat
        # Rank -> its newest heartbeat, and when it was received
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        self._connected = True
        self._main = threading.get_ident()
        self._closed = threading.Event()
        self._store = clone_default_store()
        # Two threads, because a request to the store does not return while the store's process is
        # frozen.
        self._threads = [
            threading.Thread(target=loop, daemon=True) for loop in (self._exchange, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        _running = self

    def phase(self, name: str, in_step: bool, on_host: bool) -> None:
        """See `mark_phase`.

        The first step of a process compiles and connects, and has the longer time-out too.
        """
        step = self.step()
        limit = self.config.timeout_seconds
        key = "comm.timeout_seconds"
        if in_step:
            self._first_step = self._first_step or step
            if step > self._first_step and self.config.step_timeout_seconds < limit:
                limit = self.config.step_timeout_seconds
                key = "comm.step_timeout_seconds"
        self._on_host = on_host or self.computes_here
        where = f'"{name}"' + (
            f" of step {step}" if in_step else f" after step {step}" if step else ""
        )
        self._marked = replace(
            self._marked, progress=self._marked.progress + 1, phase=where, limit=limit, key=key
        )

    def close(self) -> None:
        """The loop is over on all ranks: what follows has no time-out."""
        global _running, recorder
        _running = recorder = None
        dist.barrier()  # still watched: a rank that hangs on its way to this line is named
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)
        dist.barrier()  # keeps the store alive until every rank's final heartbeat

    def _exchange(self) -> None:
        """Thread: writes this process's heartbeats and reads the others'."""
        while not self._closed.wait(PERIOD):
            try:
                self._store.set(KEY + str(self.rank), json.dumps(asdict(self._own)))
                values = (
                    self._store.multi_get([KEY + str(rank) for rank in self._others])
                    if self._others
                    else []
                )
                self._connected = True
            except RuntimeError:  # a broken connection, which a client does not repair
                values = []
                self._connected = False
                with contextlib.suppress(RuntimeError):
                    self._store = clone_default_store()
            for rank, value in zip(self._others, values, strict=False):
                beat = self._read(value)
                if (
                    beat
                    and beat.rank == rank
                    and (rank not in self._heard or self._heard[rank][0] != beat)
                ):
                    self._heard[rank] = (beat, self._clock)

    def _watch(self) -> None:
        """Thread: looks at the clock until the loop is over or a rank hangs."""
        last = time.monotonic()
        while not self._closed.wait(TICK):
            passed = time.monotonic() - last
            last = time.monotonic()
            # More than a second has passed if this process was stopped, perhaps with all others:
            # that is no hang.
            self._clock += min(passed, 1.0)
            self._look_at_self(passed)
            diagnosis = self._diagnosis()
            if diagnosis and not self._closed.is_set():
                self._end(diagnosis)

    def _look_at_self(self, passed: float) -> None:
        """Updates this process's heartbeat."""
        marked = self._marked
        before = self._work
        self._work = self._work_done()
        # 0.1 s of CPU time or 1 MB per second is work. The store may run in rank 0: it moves bytes
        # for every rank.
        works = self._on_host and self._work[0] - before[0] > 0.1 * passed
        store = 10_000 * self.world_size if self.rank == 0 else 0
        works |= self._work[1] - before[1] > (1_000_000 + store) * passed
        waiting = 0
        place = ""
        debugged = False
        if self._clock - self._since > min(2.0, marked.limit / 2):
            waiting, place, debugged = locate(sys._current_frames()[self._main])
        if marked.progress != self._own.progress or works or debugged:
            self._since = self._clock
        still = self._clock - self._since
        self._own = replace(marked, clock=self._clock, still=still, waiting=waiting, place=place)

    def _work_done(self) -> tuple[float, int]:
        """Seconds of CPU time, and bytes read and written through files (Linux)."""
        counts: dict[str, str] = {}
        with contextlib.suppress(OSError):
            counts = dict(
                line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
            )
        # rchar and wchar count calls of read and write, read_bytes what a memory map reads from the
        # disk.
        count = sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
        return time.process_time(), count

    def _diagnosis(self) -> Diagnosis | None:
        """Rank 0's, or this process's own if rank 0 is silent."""
        own = self._own
        heard = dict(self._heard)
        if len(heard) < len(self._others) or (self.rank == 0 and not self._connected):
            return None  # rank 0 cannot judge the others; the time-outs of the collectives remain
        if self.rank and heard[0][0].diagnosis:
            return Diagnosis(**heard[0][0].diagnosis)
        others = [beat.aged(self._clock - when, own) for beat, when in heard.values()]
        found = diagnose([own, *others], own, self.folder)
        if found and self.rank == 0:
            self._own = replace(own, diagnosis=asdict(found))
        return found

    def _end(self, diagnosis: Diagnosis) -> NoReturn:
        """Exits, after time enough for all ranks to read the diagnosis and to write their reports."""
        # a node's ranks follow one another
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        node = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))
        speaks = self.rank == diagnosis.speaker(node)
        threading.Thread(target=self._report, args=(diagnosis.message, speaks), daemon=True).start()
        # Without waiting for the report: the disk may be what hangs
        time.sleep(2 * PERIOD + 2 * TICK)
        os._exit(EXIT_HUNG)

    def _report(self, message: str, speaks: bool) -> None:
        """Prints the message, and writes it with this process's stacks and collectives into its
        file.
        """
        if speaks:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self.rank}.txt").open("w") as file:
            print(f"{message}\n\n{self._own.name}, {self._own.phase}\n", file=file, flush=True)
            # Errors of collectives that break now go here and not onto the console
            os.dup2(file.fileno(), 2)
            faulthandler.dump_traceback(file=file, all_threads=True)
            print(f"\nflight recorder:\n{flight_recorder()}", file=file, flush=True)
            os.fsync(file.fileno())
