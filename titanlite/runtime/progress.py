"""Progress of long jobs: a tqdm bar on a terminal; elsewhere a line per quarter, and per minute.

What it is: one style for preparing data, converting, comparing and verifying. It writes to stderr,
so standard output stays a command's result. Jobs of less than a second show nothing.
What it costs: tqdm is imported when the first bar is made, and its monitor thread is not started.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any


def progress_bar(total: int | None, description: str, unit: str = "B") -> Any:
    """A tqdm bar up to `total`, to be used in a `with`; any thread calls `update(n)` after every n
    units.

    None: a total that is not known, so that neither share nor remaining time are shown.
    """
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread that redraws a bar which does not advance
        quarters = 0
        printed = time.monotonic()

        def update(self, n: float | None = 1) -> bool | None:
            with self.get_lock():
                return super().update(n)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if sys.stderr.isatty():
                super().display(msg, pos)
                return
            quarters = 4 * self.n // self.total if self.total else 0
            if quarters > self.quarters or time.monotonic() > self.printed + 60:
                self.quarters = quarters
                self.printed = time.monotonic()
                print(self, file=sys.stderr)  # log files get lines, not redraws

        def close(self) -> None:
            if sys.stderr.isatty():  # clears the line
                super().close()

    Bar.set_lock(threading.RLock())  # tqdm's default is a lock between processes
    return Bar(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=True,
        delay=1,
        leave=False,
        file=sys.stderr,
    )
