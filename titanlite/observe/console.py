"""The console: the line of each logged step, with the time until the end.

What it is: plain text, the same on a terminal, in a pipe and in log.txt, so that scripts can read
it. The remaining time is the number of remaining steps times the mean time of a step in the last
minutes, which includes the validations and saves among them.
What it costs: microseconds for each logged step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

# The mean time of a step is that of so many seconds: enough to be steady, few enough to follow
HORIZON = 300.0

Row = dict[str, Any]  # a row of metrics.jsonl


def step_line(position: str, row: Row, eta: float | None) -> str:
    """Formats the line of a logged step; `eta`: seconds until the end, None if not known."""
    mfu = "n/a"
    if row["mfu"] is not None:
        mfu = f"{row['mfu']:.1f}%"
    loss = "n/a"  # a step without targets
    norm = "n/a"
    if row["loss"] is not None:
        loss = f"{row['loss']:.4f}"
        norm = f"{row['grad_norm']:.3f}"
    remaining = "n/a"
    if eta is not None:
        remaining = duration(eta)
    return (
        f"{position}  "
        f"loss {loss}  "
        f"grad_norm {norm}  "
        f"lr {row['lr']:.2e}  "
        f"tps {row['tps']:,.0f}  "
        f"tflops {row['tflops']:.3g}  "
        f"mfu {mfu}  "
        f"memory {row['memory_gib']:.2f}GiB  "
        f"epoch {row['data_percent'] / 100:.2f}  "
        f"wait {row['data_wait_percent']:.1f}%  "
        f"eta {remaining}"
    )


def duration(seconds: float) -> str:
    """Formats seconds: 1:05 for 65, 2:03:04 from an hour on, with days in front from a day on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{minutes}:{seconds:02}"
    if hours or days:
        clock = f"{hours}:{minutes:02}:{seconds:02}"
    if days:
        return f"{days} d {clock}"
    return clock


class Eta:
    """Estimates the time until the end from the times of the logged steps."""

    def __init__(self) -> None:
        self._logged: deque[tuple[float, int]] = deque()  # (time, steps of this process)

    def remaining(self, now: float, steps: int, remaining_steps: int) -> float | None:
        """Adds a logged step, and returns the seconds that the remaining steps take; None at the
        first one, before which steps may have been compiled.

        `steps`: how many this process has done. A rollback does not lower it.
        """
        self._logged.append((now, steps))
        if len(self._logged) == 1:
            return None
        while now - self._logged[1][0] >= HORIZON:
            self._logged.popleft()
        first_time, first_steps = self._logged[0]
        return (now - first_time) / (steps - first_steps) * remaining_steps
