"""Runs a function on several ranks, with new processes for each call.

What it is: the process pool of `titanlite verify`, `break` and `learn`, and of the tests. The
earliest error of any rank is raised. If a rank dies or exceeds the time-out, all ranks are ended.
Why it is here: torch caches what depends on a mesh (placements, compiled blocks). In a process that
had an earlier mesh of the same shape, a cached entry would refer to process groups that no longer
exist. So each call has new processes.
What it costs: milliseconds per call, not the seconds of a launch: workers are forked from a server
that has imported torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.runtime import interpreter

GROUP_TIMEOUT = 1800  # seconds; `Pool.run` has a shorter one


class WorkerError(AssertionError):
    """A rank failed or did not answer in time; the message is its stack trace."""


class Call(NamedTuple):
    """The request that a worker receives."""

    path: list[str]  # sys.path of the caller
    rank: int
    world_size: int
    folder: Path  # of the call: the store through which the ranks meet, and the stacks of crashes
    joins: bool
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Outcome(NamedTuple):
    """The answer of a worker, or what is known about one that has died."""

    ended: float  # by the monotonic clock, the same for all processes
    error: str  # a stack trace; empty if the function has returned
    result: Any = None


def _crash_file(folder: Path, rank: int) -> Path:
    return folder / f"crash-{rank}.txt"


def _work(connection: Connection, device: str, quiet: bool) -> None:
    """Runs a worker: joins a new process group, runs one function, sends the outcome."""
    if quiet:
        os.environ["LOG_RANK"] = "none"
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    import torch
    import torch.distributed as dist

    from titanlite.distributed.process_group import join, use_loopback
    from titanlite.runtime.device import open_device

    # a collection would visit all that torch imported, and so copy the pages shared with the server
    gc.freeze()

    torch.set_num_threads(1)
    _share_no_progress_bars()
    call: Call = connection.recv()
    sys.path[:] = call.path
    crashes = _crash_file(call.folder, call.rank).open("w")
    faulthandler.enable(crashes)  # a crash in C++ writes the stack of every thread
    try:
        if device == "cuda":
            os.environ["LOCAL_RANK"] = str(call.rank)
        use_loopback()
        if call.joins:
            store = dist.FileStore(str(call.folder / "store"), call.world_size)
            join(open_device(device), GROUP_TIMEOUT, call.rank, call.world_size, store)
        result = call.function(*call.arguments)
        outcome = Outcome(time.monotonic(), "", result)
        if call.joins:
            dist.barrier()  # no rank exits while another still communicates with it
    except BaseException:
        outcome = Outcome(time.monotonic(), f"rank {call.rank}:\n{traceback.format_exc()}")
    # By value: `send` would share the memory of tensors, which ends with this process
    connection.send_bytes(pickle.dumps(outcome))
    connection.close()
    os._exit(0)  # gloo's threads can abort an orderly exit (pytorch#190489)


def _start_server() -> None:
    """Starts the process that the workers are forked from, unless it runs.

    By its environment it finds titanlite.
    """
    variables = interpreter.environment()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _share_no_progress_bars() -> None:
    """Gives tqdm a lock that only this process uses.

    Its default one has a named semaphore, which stays behind when a worker ends by `os._exit`. The
    compiler draws bars.
    """
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.set_lock(threading.RLock())


class Pool:
    """`run(n, function, *arguments)` calls a module-level function on ranks 0 .. n - 1."""

    def __init__(self, preload: list[str], device: str = "cpu", quiet: bool = False) -> None:
        """`preload`: modules that the workers share; `quiet`: their output is discarded."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", *preload])
        self._options = (device, quiet)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 60,
        grace: float = 1.0,
        joins: bool = True,
    ) -> list[Any]:
        """The results of all ranks in order. `joins`: they are in one process group.

        Raises WorkerError, `grace` seconds after the first rank has failed.
        """
        interpreter.in_root_folder(_start_server)
        workers: list[tuple[BaseProcess, Connection]] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                for rank in range(world_size):
                    ours, theirs = self._context.Pipe()
                    process: BaseProcess = self._context.Process(
                        target=_work, args=(theirs, *self._options), daemon=True
                    )
                    process.start()
                    theirs.close()
                    call = Call(
                        sys.path, rank, world_size, Path(folder), joins, function, arguments
                    )
                    ours.send(call)
                    workers.append((process, ours))
                outcomes = _collect(workers, Path(folder), time.monotonic() + timeout, grace)
                errors = [outcome for outcome in outcomes.values() if outcome.error]
                if errors:
                    earliest = min(errors, key=lambda outcome: outcome.ended)
                    raise WorkerError(earliest.error)
                silent = sorted(set(range(world_size)) - set(outcomes))
                if silent:
                    stacks = [_stop(rank, workers[rank][0], Path(folder)) for rank in silent]
                    raise WorkerError(
                        f"ranks {silent} did not answer within {timeout} s\n" + "".join(stacks)
                    )
        finally:
            for process, connection in workers:
                connection.close()
                process.kill()
                process.join()
        return [outcomes[rank].result for rank in range(world_size)]


def _collect(
    workers: list[tuple[BaseProcess, Connection]], folder: Path, deadline: float, grace: float
) -> dict[int, Outcome]:
    """Waits until all ranks have an outcome, one has failed, or the time is up.

    Returns the outcomes by rank.
    """
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(workers):
        time_left = deadline - time.monotonic()
        if time_left <= 0:
            break
        silent = {
            connection: rank for rank, (_, connection) in enumerate(workers) if rank not in outcomes
        }
        ready: list[Any] = wait(list(silent), timeout=time_left)
        for connection in ready:
            rank = silent[connection]
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                error = _describe_death(rank, workers[rank][0], folder)
                outcomes[rank] = Outcome(time.monotonic(), error)
        if any(outcome.error for outcome in outcomes.values()):
            # The error of another rank may be the cause
            deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _stop(rank: int, process: BaseProcess, folder: Path) -> str:
    """Ends a worker that does not answer. Returns what its threads were executing."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(process.pid, signal.SIGABRT)
    return _describe_death(rank, process, folder)


def _describe_death(rank: int, process: BaseProcess, folder: Path) -> str:
    """Describes the end of a worker without an outcome, with its stacks if it crashed."""
    process.join(5)  # it is still writing the stacks
    crash_file = _crash_file(folder, rank)
    stacks = ""
    if crash_file.exists():  # it may have died before it was called
        stacks = crash_file.read_text()
    return f"rank {rank} died with exit code {process.exitcode}\n{stacks}"
