"""Python's garbage collection, on all ranks after the same steps.

Why it is here: one rank that pauses to collect makes all others wait in the next collective.
"""

from __future__ import annotations

import gc

from titanlite.distributed.watchdog import mark_phase


class GarbageCollection:
    """Collects every `freq` steps; with 0 Python's own collector stays on."""

    def __init__(self, freq: int) -> None:
        self.freq, self.frozen = freq, False
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        """Call it after each step."""
        if not self.freq:
            return
        mark_phase("garbage collection")
        if not self.frozen:
            gc.collect()
            gc.freeze()  # objects of the set-up and the first step live on: later collections skip them
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
