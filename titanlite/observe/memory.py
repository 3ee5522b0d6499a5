"""Memory of this process and utilisation of its GPU, for a logged step.

What it is: on CUDA the peaks of what tensors have allocated and of what the allocator has reserved
for them, how often it had to free its cache and try again (more than 0: memory is nearly full, and
the run slower), and the resident memory of the process on the host. `gpu_utilisation` is the
driver's: the percentage of its last sampling period, at most a second, in which a kernel ran. It
needs the package nvidia-ml-py; without it the column is left out.
What it costs: under a millisecond per logged step.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak so far: reserved by the allocator on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # bytes on macOS, KiB on Linux
        peak *= 1024
    return peak / GIB


def memory_columns(device: torch.device) -> dict[str, float]:
    """Returns the columns that this machine can measure."""
    row: dict[str, float] = {}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row["memory_allocated_gib"] = stats["allocated_bytes.all.peak"] / GIB
        row["memory_reserved_gib"] = stats["reserved_bytes.all.peak"] / GIB
        row["memory_retries"] = stats["num_alloc_retries"]
        # Without the package, the driver's library or support there is no column
        with contextlib.suppress(Exception):
            row["gpu_utilisation"] = torch.cuda.utilization(device)
    with contextlib.suppress(OSError):  # Linux only
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        row["host_memory_gib"] = resident_pages * os.sysconf("SC_PAGE_SIZE") / GIB
    return row
