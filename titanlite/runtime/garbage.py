"""Runs Python's garbage collection on all ranks after the same steps.

Why it is here: automatic collection starts when enough objects have been allocated, at a different
time on each rank, and a pause of one rank makes all others wait in the next collective.
"""

from __future__ import annotations

import gc

from titanlite.runtime.phases import Phase, mark_phase


class GarbageCollection:
    """Collects every `freq` steps; 0 keeps automatic collection."""

    def __init__(self, freq: int) -> None:
        self.freq = freq
        self.frozen = False
        if freq > 0:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        """Collects if it is time; call it after each step."""
        if self.freq == 0:
            return
        mark_phase(Phase.COLLECT_GARBAGE)
        if not self.frozen:
            gc.collect()
            # Later collections skip the objects of the set-up and the first step, which stay alive
            gc.freeze()
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        """Restores automatic collection."""
        gc.unfreeze()
        gc.enable()
