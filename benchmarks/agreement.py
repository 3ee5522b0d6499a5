"""Measures how long ranks take to agree after a step: by gloo's ring, and by messages to ranks 1,
2, 4, ... further on.

    python benchmarks/agreement.py [--processes 2 4 8 16 32] [--delay-ms 20] [--calls 8]

Each process runs under strace, which delays every call that sends on a socket. So a hop takes a
known time, however many processes share the cores. The result is the median time of `bitwise_or`,
in units of this delay, and the CPU time of a call without delays. Needs strace. Takes five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import report

# The value of `agreement.MANY`: from this number of ranks on, messages are used
KINDS = {"ring": 1 << 30, "messages": 0}


def one_rank(rank: int, processes: int, store: str, kind: str, calls: int) -> None:
    import torch
    import torch.distributed as dist

    from titanlite.distributed import agreement
    from titanlite.distributed.process_group import join, use_loopback

    torch.set_num_threads(1)
    use_loopback()
    join(torch.device("cpu"), 300, rank, processes, dist.FileStore(store, processes))
    agreement.MANY = KINDS[kind]
    seconds = []
    agreement.bitwise_or(rank)
    cpu = time.process_time()
    for _ in range(calls):
        started = time.perf_counter()
        agreement.bitwise_or(0)
        seconds.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / calls
    dist.barrier()
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(seconds), "cpu": cpu}), flush=True)


def all_ranks(processes: int, store: str, kind: str, calls: int) -> None:
    """Forks the ranks from this process, so that torch is imported once."""
    from titanlite.distributed import agreement, process_group  # noqa: F401

    children = []
    for rank in range(processes):
        if not (child := os.fork()):
            one_rank(rank, processes, store, kind, calls)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def measure(processes: int, kind: str, delay_ms: float, calls: int) -> dict[str, float]:
    """Measures rank 0. `delay_ms`: the delay of each send, under strace; 0: without strace."""
    sends = "sendmsg,sendto,writev"
    strace = ["strace", "--seccomp-bpf", "-qq", "-f", "-o", "/dev/null", "-e", f"trace={sends}"]
    strace += ["-e", f"inject={sends}:delay_enter={int(delay_ms * 1000)}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--one",
            str(processes),
            f"{folder}/store",
            kind,
            str(calls),
        ]
        return report.child([*strace, *command] if delay_ms else command)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--delay-ms", type=float, default=20)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:  # in a separate process
        processes, store, kind, calls = options.one
        all_ranks(int(processes), store, kind, int(calls))
        return
    if not shutil.which("strace"):
        raise SystemExit("needs strace")
    body = [
        "| processes | ring: delays | messages: delays | ring: CPU ms | messages: CPU ms |",
        "|---" * 5 + "|",
    ]
    results: dict[str, Any] = {}
    for processes in options.processes:
        delayed = {
            kind: measure(processes, kind, options.delay_ms, options.calls) for kind in KINDS
        }
        plain = {kind: measure(processes, kind, 0, 200) for kind in KINDS}
        results[str(processes)] = {"delayed": delayed, "plain": plain}
        cells = [f"{delayed[kind]['seconds'] / options.delay_ms * 1e3:.1f}" for kind in KINDS]
        cells += [f"{plain[kind]['cpu'] * 1e3:.2f}" for kind in KINDS]
        body.append(f"| {processes} | " + " | ".join(cells) + " |")
        print(body[-1], flush=True)
    report.write("agreement", "How long the ranks take to agree after each step", body, results)


if __name__ == "__main__":
    main()
