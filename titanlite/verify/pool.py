"""Worker processes that run one function after the other, each in a fresh process group.

What it is: what `titanlite verify` and the tests run their layouts on. The workers are forked once from a server that
has torch imported, so a layout costs what it computes, not the seconds of a launch. The earliest error of any rank is
raised; a rank that dies or overruns its time ends all of them, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Outcome = tuple[float, "str | None", Any]  # when it was over, a stack trace or None, the result


class WorkerError(AssertionError):
    """A rank failed or gave no answer in time; the message is its stack trace."""


def _serve(connection: Connection, device: str, quiet: bool) -> None:
    """A worker's life."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if quiet:
        os.environ["LOG_RANK"] = "none"
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    while True:
        try:
            paths, rank, world_size, store, function, arguments = connection.recv()
        except EOFError:  # the pool was closed
            return
        sys.path[:] = paths
        outcome: Outcome
        try:
            if device == "cuda":
                torch.cuda.set_device(rank)
                os.environ["LOCAL_RANK"] = str(rank)
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
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

    def __init__(self, preload: list[str], device: str = "cpu", quiet: bool = False) -> None:
        """`preload`: modules that the workers share; `quiet`: what they print is dropped."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", *preload])
        self._options = (device, quiet)
        self._workers: list[tuple[Any, Connection]] = []

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *self._options), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """The results of all ranks in order. Raises WorkerError."""
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder, "store"))
            for rank in range(world_size):
                self._workers[rank][1].send((sys.path, rank, world_size, store, function, arguments))
            outcomes = self._collect(world_size, time.monotonic() + timeout)
        errors = sorted((outcome for outcome in outcomes.values() if outcome[1]), key=lambda outcome: outcome[0])
        if errors or len(outcomes) < world_size:
            self.close()
            missing = sorted(set(range(world_size)) - set(outcomes))
            raise WorkerError(errors[0][1] if errors else f"ranks {missing} gave no answer within {timeout} s")
        return [outcomes[rank][2] for rank in range(world_size)]

    def _collect(self, world_size: int, deadline: float) -> dict[int, Outcome]:
        """Outcomes by rank, until all are there, one failed, or time is up."""
        ranks: dict[Any, int] = {self._workers[rank][1]: rank for rank in range(world_size)}
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world_size and (left := deadline - time.monotonic()) > 0:
            silent: list[Any] = [connection for connection, rank in ranks.items() if rank not in outcomes]
            ready: list[Any] = wait(silent, timeout=left)
            for connection in ready:
                rank = ranks[connection]
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    outcomes[rank] = (time.monotonic(), f"rank {rank} died", None)
            if any(error for _, error, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + 1)  # the others may still name the cause
        return outcomes

    def close(self) -> None:
        """Ends the workers."""
        for process, connection in self._workers:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
        self._workers.clear()
