"""Python's garbage collection, on all processes after the same steps.

What it is: Python collects when it likes; one process that pauses to collect makes all others wait.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    """Collects every `freq` steps on all processes alike, instead of whenever Python likes on any of them.

    One process that pauses to collect makes all others wait. 0 leaves Python's collector on.
    """

    def __init__(self, freq: int) -> None:
        self.freq, self.frozen = freq, False
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        if not self.freq:
            return
        if not self.frozen:
            gc.collect()
            gc.freeze()  # what the set-up and the first step leave behind stays: no later collection looks at it
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
