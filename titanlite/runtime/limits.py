"""The cores and the memory that the operating system lets this process use.

What it is: files of Linux. A container sees the cores and the memory of its whole machine; what it
may use is said by its control group, of version 1 or 2, and those above it. Elsewhere memory has no
limit that is known.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
MEMORY = Path("/proc/meminfo")


def usable_cores() -> int:
    """The number of cores to compute with, at least 1, which is the number of threads to start.

    Hardware threads of one core share its arithmetic units, so a matrix product gains nothing from
    the second. A container sees all cores of its machine, so its quota is a limit too.
    """
    threads = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # on Linux
        threads = os.sched_getaffinity(0)
    cores = {_siblings(thread) for thread in threads}
    return max(1, math.ceil(min(len(cores), *map(_quota, _control_groups("cpu")))))


def _siblings(thread: int) -> str:
    """The hardware threads of this one's core, as Linux lists them; elsewhere the thread alone."""
    with contextlib.suppress(OSError):
        return (TOPOLOGY / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
    return str(thread)


def usable_memory() -> float:
    """The most that all processes of this host can allocate together, in bytes; infinite if that
    is not known.

    The smaller of the control groups' limit, and the memory that is available with free swap. What
    the group has in use already is not taken off.
    """
    sizes = {}
    with contextlib.suppress(OSError):
        for line in MEMORY.read_text().splitlines():
            name, _, size = line.partition(":")  # as in "MemAvailable:   19825948 kB"
            sizes[name] = 1024 * int(size.split()[0])
    if "MemAvailable" not in sizes:
        return math.inf
    most = min(map(_memory_limit, _control_groups("memory")))
    return min(most, sizes["MemAvailable"] + sizes.get("SwapFree", 0))


def _control_groups(controller: str) -> Iterator[Path]:
    """Yields this process's control group of a controller and those above it."""
    lines = ["0::/", f"0:{controller}:/"]
    with contextlib.suppress(OSError):
        lines += OWN_GROUPS.read_text().splitlines()
    for line in lines:  # version 2: "0::/path"; version 1: "4:cpu,cpuacct:/path"
        _, controllers, path = line.split(":", 2)
        top = CONTROL_GROUPS
        if controller in controllers.split(","):
            top = CONTROL_GROUPS / controller
        group = top / path.strip("/")
        # In a container the path may not exist; then the root's limit counts
        while group.is_relative_to(top):
            yield group
            group = group.parent


def _memory_limit(group: Path) -> float:
    """A control group's own limit in bytes; infinite without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            return int((group / name).read_text())
    return math.inf


def _quota(group: Path) -> float:
    """A control group's own quota in cores; infinite without one."""
    with contextlib.suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        quota, period = (group / "cpu.max").read_text().split()
        if quota == "max":
            return math.inf
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1
        quota = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:  # -1 is no limit
            return int(quota) / int(period)
    return math.inf
