"""What one process wants, all do after the same step: stop, save, give up.

What it is: signals, a file, a clock or an error reach a single process first. After each step one small all-reduce over
CPU memory tells the others, so that all take the same branch of the loop.
    SIGTERM, SIGINT, SIGUSR1    save and leave with code 75; a second one, a second or more later, leaves at once
    a launcher that is gone     the same: nobody would take this run's exit code
What it costs: one number a step, over gloo: no wait for the GPU.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.config.schema import LAUNCHED

logger = logging.getLogger("titanlite")


class Agreed(NamedTuple):
    """The same on all processes."""

    stop: bool
    save: bool
    failed: bool


class Requests:
    """Collects this process's wishes and agrees on them with the others."""

    def __init__(self, timeout_seconds: int) -> None:
        self.stop = False  # agreed by all processes, and once true it stays
        self._seen = 0.0  # when this process was signalled
        self._launcher = os.getppid() if {"TORCHELASTIC_RUN_ID", LAUNCHED} & os.environ.keys() else None
        # A CPU group: asking every step must not wait for the GPU.
        timeout = timedelta(seconds=timeout_seconds)
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._handle) for number in handled}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No message from here: the signal may have interrupted another one. Schedulers signal every process of a job
        # and the launcher passes its own on, so what follows within a second is the same request.
        if not self._seen:
            self._seen = time.monotonic()
        elif time.monotonic() > self._seen + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self, save: bool = False, failed: bool = False) -> Agreed:
        """What any process wants: one small all-reduce, called by all together."""
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        stop = self.stop or bool(self._seen) or orphaned
        wishes = torch.tensor(stop | save << 1 | failed << 2)
        if self._group is not None:
            dist.all_reduce(wishes, dist.ReduceOp.BOR, group=self._group)
        bits = int(wishes)
        agreed = Agreed(bool(bits & 1), bool(bits & 2), bool(bits & 4))
        if agreed.stop and not self.stop:
            logger.info("asked to stop: saving, then leaving (a second signal leaves at once)")
        self.stop = agreed.stop
        return agreed

    def agree_to_stop(self) -> bool:
        return self.agree().stop
