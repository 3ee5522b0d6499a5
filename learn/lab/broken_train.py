"""train.py with an accident: what the failure lab runs on each rank.

What it is: the environment variable TITANLITE_LAB holds the case, and where and when the accident
happens. One method of the program is replaced by one that checks whether it is time; then train.py
runs as it is.
Why it is here: accidents of real machines cannot be ordered. These have the same effect: a process
that is stopped by a signal, one that is killed while it writes, a limit on the size of files in
place of a full disk, a loss that is not a number.
What it costs: nothing is damaged outside of the run's folder. The limit on files is this process's.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint import shard_file
from titanlite.checkpoint.shard_file import Shard
from titanlite.config.load import program_folder
from titanlite.data.rows import Batch
from titanlite.data.stream import TrainStream
from titanlite.distributed.watchdog import Watchdog
from titanlite.parallel.stages import Stages
from titanlite.runtime.phases import Phase
from titanlite.tools.faults.fault import replaced

Accident = AbstractContextManager[Any]
FILE_LIMIT = 100_000  # bytes: logs fit, a checkpoint's file does not
SEEN = 1.5  # seconds after which the other ranks have heard in which phase this one is


def freeze(rank: int, at: int, phase: str) -> Accident:
    """Stops the process of a rank in a phase of a step, as a debugger or a sick machine does."""
    original = Watchdog.phase_begins

    def phase_begins(self: Watchdog, now: Phase) -> None:
        original(self, now)
        if self.rank == rank and self.progress.step == at and now.text == phase:
            time.sleep(SEEN)
            os.kill(os.getpid(), signal.SIGSTOP)

    return replaced(Watchdog, "phase_begins", phase_begins)


def kill(rank: int, at: int) -> Accident:
    """Kills the process of a rank in the middle of a file of the checkpoint of step `at`."""
    original = shard_file.write_file

    def write_file(path: Path, shard: Shard) -> int:
        size = original(path, shard)
        # A save writes into a folder with another name, which it renames at the end
        if dist.get_rank() == rank and path.parent.name.startswith(f"step-{at}.tmp"):
            os.truncate(path, size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return size

    return replaced(shard_file, "write_file", write_file)


def fill_disk(rank: int, at: int) -> Accident:
    """From step `at` on, no file of a rank may become larger than FILE_LIMIT."""
    original = Watchdog.phase_begins

    def phase_begins(self: Watchdog, now: Phase) -> None:
        original(self, now)
        if self.rank == rank and self.progress.step == at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))

    return replaced(Watchdog, "phase_begins", phase_begins)


def poison(sample: int) -> Accident:
    """The loss is NaN in each step that contains this sample."""
    next_step = TrainStream.next_step
    forward_backward = Stages.forward_backward
    poisoned = False

    def read(self: TrainStream) -> list[Batch]:
        nonlocal poisoned
        batches = next_step(self)
        numbers = [self.order.number(position) for position in range(self.begun, self.samples)]
        poisoned = sample in numbers
        return batches

    def compute(self: Stages, *arguments: Any) -> Tensor:
        loss = forward_backward(self, *arguments)
        return loss * float("nan") if poisoned else loss

    both = contextlib.ExitStack()
    both.enter_context(replaced(TrainStream, "next_step", read))
    both.enter_context(replaced(Stages, "forward_backward", compute))
    return both


ACCIDENTS: dict[str, Callable[..., Accident]] = {
    "freeze": freeze,
    "kill": kill,
    "disk": fill_disk,
    "poison": poison,
}


def main() -> None:
    accident: dict[str, Any] = json.loads(os.environ["TITANLITE_LAB"])
    plant = ACCIDENTS[accident.pop("case")]
    with plant(**accident):
        runpy.run_path(str(program_folder() / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
