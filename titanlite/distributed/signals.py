"""Signals and requests: collects local requests to stop, save or give up, and combines them after
each step.

What it is: a signal, the file SAVE or PROFILE, a clock or an error reaches a single process first.
Combined, they make all processes take the same branch of the loop after the same step.
    SIGTERM, SIGINT, SIGUSR1    save and exit with code 75; a second signal, at least a second later, exits at once
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

from titanlite.runtime.errors import LAUNCHED

logger = logging.getLogger("titanlite")


class Agreed(NamedTuple):
    """The requests of all processes together."""

    stop: bool
    save: bool
    failed: bool
    profile: bool


class FileRequest:
    """A request by a file with this path (`touch outputs/debug/SAVE`).

    Rank 0 removes the file when it is seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._looked_at = time.monotonic()
        self.open = False

    def seen(self) -> bool:
        """Whether the file was there since the last answer, which sets `open` to false: a step may
        be rolled back.

        Looks at most once a second, because network file systems are slow.
        """
        now = time.monotonic()
        if dist.get_rank() == 0 and now >= self._looked_at + 1:
            self._looked_at = now
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.open = True
        return self.open


class Requests:
    """Collects the requests of this process and combines them with those of all others."""

    def __init__(self) -> None:
        self.stop = False  # agreed by all processes; never reset
        self._seen = 0.0  # when this process was signalled
        self._launcher = (
            os.getppid() if {"TORCHELASTIC_RUN_ID", LAUNCHED} & os.environ.keys() else None
        )
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._handle) for number in handled}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No message from here, as the signal may have interrupted a print. A scheduler signals
        # every process of a job, and the launcher forwards the signal as well, so a signal within a
        # second is the same request.
        if not self._seen:
            self._seen = time.monotonic()
        elif time.monotonic() > self._seen + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self, save: bool = False, failed: bool = False, profile: bool = False) -> Agreed:
        """The requests of all processes, which all call this together."""
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        stop = self.stop or bool(self._seen) or orphaned
        bits = stop | save << 1 | failed << 2 | profile << 3
        if dist.get_world_size() > 1:
            # Not imported by a run of one rank
            from titanlite.distributed.exchange import bitwise_or

            bits = bitwise_or(bits)  # over gloo, so it does not wait for the GPU
        agreed = Agreed(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8))
        if agreed.stop and not self.stop:
            text = "stop requested: saving, then exiting (a second signal exits at once)"
            logger.info(text, extra={"event": "signal"})
        self.stop = agreed.stop
        return agreed

    def agree_to_stop(self) -> bool:
        return self.agree().stop
