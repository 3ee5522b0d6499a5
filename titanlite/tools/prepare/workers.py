"""Parts of a job on the cores of this machine, or on Ray.

What it is: each worker is a separate process. It reads the numbers of parts from its standard
input, one at a time, and writes one JSON line per message: bytes read, a part that is done, or what
is wrong. A worker needs nothing but the working folder, so the same function runs as a task of Ray
on other machines that share the file system.
Why it is here: a child process started by command, unlike one of `multiprocessing`, imports neither
the main program nor torch, and it ends when its pipe closes, also if this process is killed.
What it costs: a quarter of a second per worker. Two workers and this process take 75 to 83 MB of
memory in all (PSS).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.runtime import interpreter
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.job import Job, read_job
from titanlite.tools.prepare.part import run_part

REPORTED = 1 << 20  # bytes between two messages of progress

Message = dict[str, Any]


def run_parts(
    job: Job,
    work: Path,
    tokenizer: Tokenizer,
    parts: list[int],
    workers: int,
    progress: Callable[[int], Any],
) -> Iterator[int]:
    """Runs the next step of these parts on up to `workers` processes; yields the number of each
    part that is done.

    A single worker is this process. Raises ConfigError as the first part that fails does; then the
    others are ended.
    """
    if min(workers, len(parts)) <= 1:
        for part in parts:
            run_part(job, work, tokenizer, part, progress)
            yield part
        return
    messages: queue.Queue[Message] = queue.Queue()
    waiting = iter(parts)
    children = []
    try:
        for _ in range(min(workers, len(parts))):
            child = start_worker(work)
            children.append(child)
            threading.Thread(target=_listen, args=(child, messages), daemon=True).start()
            _send(child, next(waiting))
        num_unfinished = len(parts)
        while num_unfinished:
            message = messages.get()
            if "read" in message:
                progress(message["read"])
            elif "done" in message:
                num_unfinished -= 1
                _send(message["from"], next(waiting, None))
                yield message["done"]
            else:
                raise ConfigError(message["problems"])
    finally:
        for child in children:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]


def start_worker(work: Path) -> subprocess.Popen[str]:
    environment = os.environ | interpreter.environment()
    piped: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "encoding": "utf-8",
    }
    # Not in this process's group: Ctrl-C is for this process, which ends the workers.
    return subprocess.Popen(
        interpreter.call(main, work), env=environment, start_new_session=True, **piped
    )


def _send(child: subprocess.Popen[str], part: int | None) -> None:
    """The next part for a worker, or the end of its input."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its listener reports
        if part is None:
            child.stdin.close()
        else:
            child.stdin.write(f"{part}\n")
            child.stdin.flush()


def _listen(child: subprocess.Popen[str], messages: queue.Queue[Message]) -> None:
    """Passes on what a worker writes, and how it ended unless its input had ended before."""
    assert child.stdout is not None
    try:
        for line in child.stdout:
            messages.put({**json.loads(line), "from": child})
    except ValueError as error:
        # Not a message; or the pipe is closed, because another worker failed
        messages.put({"problems": [f"a worker wrote something unexpected: {error}"]})
    code = child.wait()
    if code:
        end = f"exit code {code}"
        if code < 0:
            end = f"signal {-code} (the system may have run out of memory)"
        problem = f"a worker ended with {end}; the same command goes on where it was"
        messages.put({"problems": [problem]})


def _open(work: Path) -> tuple[Job, Tokenizer]:
    job = read_job(work)
    return job, Tokenizer(job.tokenizer)


def run_on_ray(work: Path, parts: list[int]) -> Iterator[int]:
    """Runs the next step of these parts as tasks of Ray: a running cluster's ($RAY_ADDRESS), or one
    on this machine.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--engine ray: needs the package ray: pip install 'titanlite[ray]'"
        ) from None

    @ray.remote(num_cpus=1)
    def task(part: int) -> int | list[str]:
        from titanlite.tools.prepare.workers import run_one

        return run_one(work, part)

    env = {"env_vars": {"PYTHONPATH": interpreter.environment()["PYTHONPATH"]}}
    # Ray puts this process's current folder into the sys.path of its workers.
    interpreter.in_root_folder(
        lambda: ray.init(ignore_reinit_error=True, log_to_driver=False, runtime_env=env)
    )
    try:
        tasks = [task.remote(part) for part in parts]
        while tasks:
            (done, *_), tasks = ray.wait(tasks)
            result = ray.get(done)
            if isinstance(result, list):
                raise ConfigError(result)
            yield result
    finally:
        ray.shutdown()


def run_one(work: Path, part: int) -> int | list[str]:
    """One part in this process; returns its number, or what is wrong."""
    try:
        job, tokenizer = _open(work)
        run_part(job, work, tokenizer, part, lambda read: None)
    except (ConfigError, OSError) as error:
        return problems(error)
    return part


def problems(error: ConfigError | OSError) -> list[str]:
    """The lines that a user sees."""
    if isinstance(error, ConfigError):
        return error.problems
    problem = f"{error.strerror or error}, while the data was prepared"
    if error.filename is not None:
        problem = f"{error.filename}: {problem}"
    return [problem]


def main(folder: str) -> None:
    """A worker process for a working folder: parts from standard input, messages to standard
    output.
    """
    work = Path(folder)
    read = 0
    output = sys.stdout

    def report(message: Message) -> None:
        print(json.dumps(message), file=output, flush=True)

    def progress(count: int) -> None:
        nonlocal read
        read += count
        if read >= REPORTED:
            report({"read": read})
            read = 0

    try:
        with contextlib.redirect_stdout(sys.stderr):  # for what libraries print
            job, tokenizer = _open(work)
            for line in sys.stdin:
                run_part(job, work, tokenizer, int(line), progress)
                report({"read": read})
                report({"done": int(line)})
                read = 0
    except (ConfigError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # the process that started this one is gone
            report({"problems": problems(error)})
