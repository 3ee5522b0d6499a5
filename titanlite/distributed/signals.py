"""Signals and requests: collects local stop and save requests, and combines them after each step.

What it is: a signal, the file SAVE or PROFILE, a clock or an error reaches one process first. The
combined requests make all processes take the same branch of the loop after the same step.
    SIGTERM, SIGINT, SIGUSR1    save and exit with code 75; a second signal, at least a second
                                later, exits at once
    the launcher has exited     the same, because nothing would receive this run's exit code
What it costs: one number per step over gloo, without a GPU synchronization.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from titanlite.distributed.agreement import bitwise_or
from titanlite.runtime.errors import LAUNCHER

logger = logging.getLogger("titanlite")
# Seconds between two checks for a file: network file systems are slow
LOOK_EVERY = 1.0
STDERR = 2
ANSWER = (
    b"stopping after the current step or the set-up, which may be compiling "
    b"(a second signal exits at once)\n"
)


class Agreed(NamedTuple):
    """The requests of all processes together."""

    stop: bool
    save: bool
    trouble: bool  # a save in the background has failed, or the guard has noticed a bad step
    profile: bool


class RequestFile:
    """A request by a file (`touch outputs/debug/SAVE`), which rank 0 removes when it sees it.

    The request stays pending until it is fulfilled: a step may be rolled back in between.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = False
        self.looked_at = time.monotonic()

    def is_pending(self) -> bool:
        """Whether the file was seen and the request is not fulfilled yet.

        Checks for the file at most every LOOK_EVERY seconds.
        """
        now = time.monotonic()
        if dist.get_rank() == 0 and now >= self.looked_at + LOOK_EVERY:
            self.looked_at = now
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.pending = True
        return self.pending

    def fulfilled(self) -> None:
        self.pending = False


class Requests:
    """Collects the requests of this process and combines them with those of all others."""

    def __init__(self, folder: Path, parent: int) -> None:
        """`folder`: the run's folder, in which the files SAVE and PROFILE may appear. `parent`: the
        process that started this one, read when it began: under torchrun it must be alive, as our
        launcher must, which passes its own id.
        """
        self.stop = False  # agreed by all processes; never reset
        self.save_file = RequestFile(folder / "SAVE")
        self.profile_file = RequestFile(folder / "PROFILE")
        self.signalled = 0.0  # time of the first signal to this process
        self._launcher: int | None = None  # the process that must be alive
        if LAUNCHER in os.environ:
            self._launcher = int(os.environ[LAUNCHER])
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher = parent
        self._former_handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._former_handlers[number] = signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A scheduler signals every process of a job, and the launcher forwards the signal as well,
        # so another signal within a second is the same request.
        now = time.monotonic()
        if not self.signalled:
            self.signalled = now
            if dist.get_rank() == 0:
                # At once, because the step may take minutes, as one that compiles. No print: the
                # signal may have interrupted one. The terminal may be gone
                with contextlib.suppress(OSError):
                    os.write(STDERR, ANSWER)
        elif now > self.signalled + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._former_handlers.items():
            if handler is not None:  # None: not set from Python, so Python cannot restore it
                signal.signal(number, handler)

    def agree(self, save: bool = False, trouble: bool = False) -> Agreed:
        """Combines the requests of all processes after a step; all call it together.

        `save`, `trouble`: this process's own request and report. The request of a file is repeated
        after each step until `saved` or `profiled` is called.
        """
        save_file = self.save_file.is_pending()
        profile_file = self.profile_file.is_pending()
        return self._combine(save or save_file, trouble, profile_file)

    def saved(self) -> None:
        """Call it when a save has begun: fulfils the request."""
        self.save_file.fulfilled()

    def profiled(self) -> None:
        """Call it when a recording has begun, or cannot begin: fulfils the request."""
        self.profile_file.fulfilled()

    def agree_to_stop(self) -> bool:
        """Whether any process is to stop. All call it together, also within a step."""
        return self._combine(False, False, False).stop

    def _combine(self, save: bool, trouble: bool, profile: bool) -> Agreed:
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        stop = self.stop or self.signalled > 0 or orphaned
        bits = stop | save << 1 | trouble << 2 | profile << 3
        bits = bitwise_or(bits)  # over gloo, so it does not wait for the GPU
        agreed = Agreed(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8))
        if agreed.stop and not self.stop:
            text = "stop requested: saving, then exiting (a second signal exits at once)"
            logger.info(text, extra={"event": "signal"})
        self.stop = agreed.stop
        return agreed
