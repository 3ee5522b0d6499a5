"""Shows the progress of long jobs: a tqdm bar on a terminal, else a line per quarter and minute.

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
    """Builds a tqdm bar up to `total`, for use in a `with`; any thread calls `update(n)` after
    every n units.

    With `total` None, neither share nor remaining time is shown.
    """
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread to redraw a bar that does not advance
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
            if sys.stderr.isatty():  # clear the line
                super().close()

    Bar.set_lock(threading.RLock())  # instead of tqdm's lock between processes
    return Bar(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=True,
        delay=1,
        leave=False,
        file=sys.stderr,
    )
