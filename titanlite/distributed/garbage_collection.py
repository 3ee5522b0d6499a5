"""Garbage collection on all processes after the same steps.

What it is: Python starts a collection whenever enough objects have been allocated, in each process at another time, and
every pause of one process makes all others wait in the next collective. So it is disabled and started every `freq`
steps.
What it costs: a pause every `freq` steps, and the memory of cyclic garbage until then.
"""

from __future__ import annotations

import gc

from titanlite.distributed.watchdog import mark_phase


class GarbageCollection:
    """Collects every `freq` steps; 0 leaves Python's collector enabled."""

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
