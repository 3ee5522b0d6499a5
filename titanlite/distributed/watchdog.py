"""Watchdog: ends a run that hangs, and names the rank that blocks the others and its phase.

What it is: two threads in every process. One writes heartbeats into the store that the process
group was joined through, and reads those of others: rank 0 reads all, the others only rank 0's. The
second watches the clock and calls `diagnose`. When that names a rank, every process writes its
stacks into `<run folder>/hang/` and exits with 124. The launcher kills a frozen process two seconds
later (torchrun, 30 seconds later).
A process that reads, writes, computes or is held in a debugger does not stand still. In phases that
may wait for a GPU, CPU time is no sign of computing, because waiting takes CPU time too.
If other ranks wait for such a process in a collective, that collective's own time-out ends the run,
ten seconds after this one.
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
from collections.abc import Container
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from titanlite.config.schema import CommConfig
from titanlite.distributed.hang_diagnosis import (
    IN_PYTHON,
    Diagnosis,
    Heartbeat,
    Location,
    diagnose,
    locate,
    read_heartbeat,
)
from titanlite.distributed.torch_private import clone_default_store, flight_recorder
from titanlite.runtime.errors import EXIT_HUNG
from titanlite.runtime.phases import Phase, add_listener, remove_listener

KEY = "titanlite/heartbeat/"
# Seconds between heartbeats, and between checks of the clock
PERIOD = 0.5
TICK = 0.25


class Work(NamedTuple):
    """The work of this process so far."""

    cpu_seconds: float
    num_bytes: int  # bytes read from and written to files (Linux)


def work_done() -> Work:
    counts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
    # rchar and wchar count calls of read and write; read_bytes counts what memory maps read
    num_bytes = sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
    return Work(time.process_time(), num_bytes)


class HasStep(Protocol):
    """The attribute of a run's progress that the watchdog reads."""

    step: int


class Watchdog:
    """Ends the run if a rank hangs; runs from its construction to `close`.

    All ranks construct and close it together; one per process.
    """

    def __init__(
        self,
        config: CommConfig,
        folder: Path,
        progress: HasStep,
        device: torch.device,
        compiling_steps: Container[int] = (),
    ) -> None:
        """`folder`: the run's folder; `progress` has the current step. In `compiling_steps`, as in
        the first step of this process, the longer time-out holds.
        """
        self.config = config
        self.compiling_steps = compiling_steps
        self.folder = folder / "hang"
        self.progress = progress
        # If the model computes on the CPU, CPU time means progress
        self.computes_on_host = device.type == "cpu"
        self._on_host = self.computes_on_host
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.own = Heartbeat(self.rank, socket.gethostname(), os.getpid())
        self.marked = self.own
        self._first_step = 0
        self._clock = 0.0  # seconds this process has run
        self._since = 0.0  # when it last made progress
        self._work = work_done()
        self._others = [0]  # the ranks whose heartbeats this process reads
        if self.rank == 0:
            self._others = list(range(1, self.world_size))
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
        add_listener(self.phase_begins)

    def phase_begins(self, phase: Phase) -> None:
        """Records the start of a phase; `mark_phase` calls it.

        The first step of a process compiles and connects, and has the longer time-out too; so has
        a step with a batch of another size, for which blocks are compiled again.
        """
        if phase.times_only:
            return
        step = self.progress.step
        limit = self.config.timeout_seconds
        key = "comm.timeout_seconds"
        text = f'"{phase.text}"'
        if phase.in_step:
            text = f"{text} of step {step}"
            if self._first_step == 0:  # not 1 in a run that has resumed
                self._first_step = step
            compiles = step == self._first_step or step in self.compiling_steps
            if not compiles and self.config.step_timeout_seconds < limit:
                limit = self.config.step_timeout_seconds
                key = "comm.step_timeout_seconds"
        elif step > 0:
            text = f"{text} after step {step}"
        self._on_host = phase.on_host or self.computes_on_host
        self.marked = replace(
            self.marked, progress=self.marked.progress + 1, phase=text, limit=limit, key=key
        )

    def close(self) -> None:
        """Ends the watch after the loop; what follows has no time-out. All ranks call it."""
        remove_listener(self.phase_begins)
        dist.barrier()  # still watched, so a rank that hangs before this line is named
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)
        dist.barrier()  # keeps the store alive until every rank's final heartbeat

    def _exchange(self) -> None:
        """Runs as a thread: writes this process's heartbeats and reads the others'."""
        while not self._closed.wait(PERIOD):
            try:
                self._store.set(KEY + str(self.rank), json.dumps(asdict(self.own)))
                values = []
                if self._others:
                    values = self._store.multi_get([KEY + str(rank) for rank in self._others])
                self._connected = True
            except RuntimeError:  # a broken connection, which a client does not repair
                values = []
                self._connected = False
                with contextlib.suppress(RuntimeError):
                    self._store = clone_default_store()
            for rank, value in zip(self._others, values, strict=False):
                beat = read_heartbeat(value)
                if beat is None or beat.rank != rank:
                    continue
                if rank not in self._heard or self._heard[rank][0] != beat:
                    self._heard[rank] = (beat, self._clock)

    def _watch(self) -> None:
        """Runs as a thread: checks the clock until the loop is over or a rank hangs."""
        last = time.monotonic()
        while not self._closed.wait(TICK):
            passed = time.monotonic() - last
            last = time.monotonic()
            # If more than a second has passed, this process was suspended, perhaps with all
            # others. That is not a hang.
            self._clock += min(passed, 1.0)
            self._look_at_self(passed)
            diagnosis = self._diagnosis()
            if diagnosis and not self._closed.is_set():
                self._end(diagnosis)

    def _look_at_self(self, passed: float) -> None:
        """Updates this process's heartbeat."""
        marked = self.marked
        before = self._work
        self._work = work_done()
        # 0.1 s of CPU time or 1 MB per second is work
        computes = self._on_host and self._work.cpu_seconds - before.cpu_seconds > 0.1 * passed
        most_idle_bytes = 1_000_000
        if self.rank == 0:  # rank 0 may serve the store, which moves bytes for every rank
            most_idle_bytes += 10_000 * self.world_size
        reads_or_writes = self._work.num_bytes - before.num_bytes > most_idle_bytes * passed
        location = Location(IN_PYTHON, "", False)
        if self._clock - self._since > min(2.0, marked.limit / 2):
            location = locate(sys._current_frames()[self._main])
        begun = marked.progress != self.own.progress
        if begun or computes or reads_or_writes or location.debugged:
            self._since = self._clock
        self.own = replace(
            marked,
            clock=self._clock,
            still=self._clock - self._since,
            waiting=location.waiting,
            place=location.place,
        )

    def _diagnosis(self) -> Diagnosis | None:
        """Returns rank 0's diagnosis, or this process's own if rank 0 is silent."""
        own = self.own
        heard = dict(self._heard)
        if len(heard) < len(self._others) or (self.rank == 0 and not self._connected):
            return None  # rank 0 cannot judge the others; collectives still time out
        if self.rank != 0:
            of_rank0, _ = heard[0]
            if of_rank0.diagnosis:
                return of_rank0.diagnosis
        others = [beat.aged(self._clock - when, own) for beat, when in heard.values()]
        diagnosis = diagnose([own, *others], own, self.folder)
        if diagnosis is not None and self.rank == 0:
            self.own = replace(own, diagnosis=diagnosis)
        return diagnosis

    def _end(self, diagnosis: Diagnosis) -> NoReturn:
        """Exits, after time for all ranks to read the diagnosis and to write their reports."""
        # The ranks of a node are consecutive
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        node = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))
        prints = self.rank == diagnosis.speaker(node)
        reporter = threading.Thread(
            target=self._report, args=(diagnosis.message, prints), daemon=True
        )
        reporter.start()
        # Do not wait for the report: the disk may be what hangs
        time.sleep(2 * PERIOD + 2 * TICK)
        os._exit(EXIT_HUNG)

    def _report(self, message: str, prints: bool) -> None:
        """Prints the message, and writes it with this process's stacks and collectives into its
        file.
        """
        if prints:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self.rank}.txt").open("w") as file:
            print(f"{message}\n\n{self.own.name}, {self.own.phase}\n", file=file, flush=True)
            # Errors of collectives that now break go here, not to the console
            os.dup2(file.fileno(), 2)
            faulthandler.dump_traceback(file=file, all_threads=True)
            print(f"\nflight recorder:\n{flight_recorder()}", file=file, flush=True)
            os.fsync(file.fileno())
