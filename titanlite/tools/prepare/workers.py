"""Runs the parts of a job on the cores of this machine.

What it is: each worker is a process that reads the numbers of parts from its standard input and
answers each with one JSON line: that it is done, or what is wrong. A thread of this process waits
for each of them.
Why it is here: a child process started by command, unlike one of `multiprocessing`, imports neither
the main program nor torch, and it ends with this process, also if that is killed.
What it costs: a quarter of a second per worker. Two workers and this process take 75 MB of memory
in all (PSS).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from titanlite.runtime import interpreter
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.job import Job, read_job
from titanlite.tools.prepare.part import run_part


def run_parts(
    job: Job, work: Path, tokenizer: Tokenizer, parts: list[int], workers: int
) -> Iterator[int]:
    """Runs the next step of these parts on up to `workers` processes; yields the number of each
    part that is done.

    A single worker is this process. Raises ConfigError if a part fails; then all workers are ended.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        for part in parts:
            run_part(job, work, tokenizer, part)
            yield part
        return
    idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    children = []

    def run(part: int) -> int:
        child = idle.get()
        try:
            _ask(child, part)
        finally:
            idle.put(child)
        return part

    with ThreadPoolExecutor(workers) as threads:
        try:
            for _ in range(workers):
                children.append(start_worker(work))
                idle.put(children[-1])
            futures = [threads.submit(run, part) for part in parts]
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for child in children:
                _stop(child)


def start_worker(work: Path) -> subprocess.Popen[str]:
    # Not in this process's group: Ctrl-C is for this process, which ends the workers.
    return subprocess.Popen(
        interpreter.call(main, work, os.getpid()),
        env=os.environ | interpreter.environment(),
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def _ask(child: subprocess.Popen[str], part: int) -> None:
    """Has a worker run a part. Raises ConfigError with what is wrong."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen below
        child.stdin.write(f"{part}\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if line:
        problems = json.loads(line)["problems"]
    else:
        code = child.wait()
        end = f"exit code {code}"
        if code < 0:
            end = f"signal {-code} (the system may have run out of memory)"
        problems = [f"a worker ended with {end}; the same command goes on where it was"]
    if problems:
        raise ConfigError(problems)


def _stop(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]


def problems_of(error: ConfigError | OSError) -> list[str]:
    """The lines that a user sees."""
    if isinstance(error, ConfigError):
        return error.problems
    problem = f"{error.strerror or error}, while the data was prepared"
    if error.filename is not None:
        problem = f"{error.filename}: {problem}"
    return [problem]


def main(folder: str, parent: str) -> None:
    """A worker of the process `parent` for a working folder: parts from standard input, answers to
    standard output.
    """
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    work = Path(folder)
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # for what libraries print
        try:
            job = read_job(work)
            tokenizer = Tokenizer(job.tokenizer)
            for line in sys.stdin:
                run_part(job, work, tokenizer, int(line))
                print(json.dumps({"problems": []}), file=output, flush=True)
        except (ConfigError, OSError) as error:
            print(json.dumps({"problems": problems_of(error)}), file=output, flush=True)


def _end_with_parent(parent: int) -> None:
    """Ends this process within a second of the one that started it, also within a part."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
