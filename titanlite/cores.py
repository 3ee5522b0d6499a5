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
OWN_GROUPS = Path("/proc/self/cgroup")
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
    """How many cores' time may be used: the least that this process's control group, or one above it, is given."""
    own = ["0::/", "0:cpu:/"]
    with contextlib.suppress(OSError):
        own += OWN_GROUPS.read_text().splitlines()
    least = float("inf")
    for line in own:  # version 2: "0::/path"; version 1: "4:cpu,cpuacct:/path"
        _, controllers, path = line.split(":", 2)
        top = CONTROL_GROUPS / ("cpu" if "cpu" in controllers.split(",") else "")
        group = top / path.strip("/")
        while group.is_relative_to(top):  # in a container a path may lead nowhere, and its top is what it is given
            least = min(least, _limit(group))
            group = group.parent
    return least


def _limit(group: Path) -> float:
    """A control group's own quota in cores; infinite without one."""
    with contextlib.suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        limit, period = (group / "cpu.max").read_text().split()
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
        limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    return float("inf")
