"""Four worker processes that all multi-process tests share.

A test says which function to run on how many ranks. The workers are forked once from a server that has torch
imported, so a test costs milliseconds, not the seconds of a new launch. Each test gets a process group of its own
over a file; the earliest error of any rank is raised; a rank that dies or overruns its time ends all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

SIZE = 4


def _serve(connection: Connection) -> None:
    """A worker: runs one function after the other, each in a fresh process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOG_RANK"] = "none"
    while True:
        try:
            paths, rank, world_size, store, function, arguments = connection.recv()
        except EOFError:  # the pool was closed
            return
        sys.path[:] = paths
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
            outcome = (time.monotonic(), None, function(*arguments))
        except BaseException:
            outcome = (time.monotonic(), f"rank {rank}:\n{traceback.format_exc()}", None)
        finally:
            if dist.is_initialized() and outcome[1] is None:
                dist.barrier()
                dist.destroy_process_group()
        connection.send(outcome)
        if outcome[1] is not None:
            connection.close()
            os._exit(1)  # its process group may be in any state


class Pool:
    """`run(n, function, *arguments)` calls a module-level function on ranks 0 .. n - 1."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "train"])
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def _start(self) -> tuple[multiprocessing.Process, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, world_size: int, function, *arguments, timeout: float = 60):
        """The results of all ranks in order. Raises AssertionError with a rank's stack trace, or on time-out."""
        while len(self._workers) < SIZE:
            self._workers.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder, "store"))
            for rank in range(world_size):
                self._workers[rank][1].send((sys.path, rank, world_size, store, function, arguments))
            outcomes = self._collect(world_size, time.monotonic() + timeout)
        errors = sorted((when, error) for when, error, _ in outcomes.values() if error)
        if errors or len(outcomes) < world_size:
            self.close()
            missing = sorted(set(range(world_size)) - set(outcomes))
            raise AssertionError(errors[0][1] if errors else f"ranks {missing} gave no answer within {timeout} s")
        return [outcomes[rank][2] for rank in range(world_size)]

    def _collect(self, world_size: int, deadline: float) -> dict[int, tuple]:
        """Outcomes by rank, until all are there, one failed, or time is up."""
        ranks = {self._workers[rank][1]: rank for rank in range(world_size)}
        outcomes: dict[int, tuple] = {}
        while len(outcomes) < world_size and (left := deadline - time.monotonic()) > 0:
            for connection in wait([c for c, rank in ranks.items() if rank not in outcomes], timeout=left):
                rank = ranks[connection]
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    outcomes[rank] = (time.monotonic(), f"rank {rank} died", None)
            if any(error for _, error, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + 1)  # the others may still name the cause
        return outcomes

    def close(self) -> None:
        """Ends the workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()
