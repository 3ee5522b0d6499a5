"""How many cores there are to compute with.

What it is: the threads that training starts, all processes together. Two threads that share a core have one set of
arithmetic units: a matrix product gains nothing from the second, and both wait for each other. And a container that
may use two of a machine's 64 cores sees all of them: 64 threads would spend their time being stopped. So this counts
cores instead of hardware threads, as far as this process may run on them and its control group lets it.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """At least 1."""
    threads = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(thread) for thread in threads}
    return max(1, math.ceil(min(len(cores), _quota())))


def _siblings(thread: int) -> str:
    """The hardware threads that share this one's core, as Linux lists them; elsewhere the thread itself."""
    with contextlib.suppress(OSError):
        return (TOPOLOGY / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
    return str(thread)


def _quota() -> float:
    """How many cores' time the control group may use; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        limit, period = (CONTROL_GROUPS / "cpu.max").read_text().split()
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
        limit, period = ((CONTROL_GROUPS / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    return float("inf")
