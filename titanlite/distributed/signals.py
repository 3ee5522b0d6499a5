"""Signals and requests: collects local requests to stop, save or give up, and all-reduces them after each step.

What it is: a signal, the SAVE file, a clock or an error reaches a single process first. The all-reduce makes all
processes take the same branch of the loop after the same step.
    SIGTERM, SIGINT, SIGUSR1    save and exit with code 75; a second signal, at least a second later, exits at once
    the launcher has exited     the same, because nothing would receive this run's exit code
What it costs: one number per step over gloo, without a GPU synchronization.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite.config.schema import LAUNCHED

logger = logging.getLogger("titanlite")


class Agreed(NamedTuple):
    """The requests of all processes together."""

    stop: bool
    save: bool
    failed: bool


class Requests:
    """Collects the requests of this process and combines them with those of all others."""

    def __init__(self) -> None:
        self.stop = False  # agreed by all processes; never reset
        self._seen = 0.0  # when this process was signalled
        self._launcher = os.getppid() if {"TORCHELASTIC_RUN_ID", LAUNCHED} & os.environ.keys() else None
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._handle) for number in handled}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No message from here, as the signal may have interrupted a print. A scheduler signals every process of a job,
        # and the launcher forwards the signal as well, so a signal within a second is the same request.
        if not self._seen:
            self._seen = time.monotonic()
        elif time.monotonic() > self._seen + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self, save: bool = False, failed: bool = False) -> Agreed:
        """The requests of all processes: one small all-reduce, which all call together."""
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        stop = self.stop or bool(self._seen) or orphaned
        requests = torch.tensor(stop | save << 1 | failed << 2)
        if dist.get_world_size() > 1:
            dist.all_reduce(requests, dist.ReduceOp.BOR)  # of a CPU tensor: by gloo, so it does not wait for the GPU
        bits = int(requests)
        agreed = Agreed(bool(bits & 1), bool(bits & 2), bool(bits & 4))
        if agreed.stop and not self.stop:
            logger.info("stop requested: saving, then exiting (a second signal exits at once)")
        self.stop = agreed.stop
        return agreed

    def agree_to_stop(self) -> bool:
        return self.agree().stop
