"""Runs a function of this package in a process with limits, for work on a file from elsewhere.

What it is: the process is a new interpreter. It finds the modules of Python, of this package and of
the packages that are named, and none in the current folder or PYTHONPATH. The parent gives it
requests, lines of JSON, and ends it with `stop`; the process sets its own limits by `forbid` and
`limit` before it reads anything.
Why it is here: a parser that is given a hostile file can loop, take all memory, or end the process
that it runs in. In a process with limits each of these is an error.
What it costs: 25 ms for a process, and what it imports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.runtime import interpreter


def command(main: Callable[..., None], packages: Sequence[str], *arguments: object) -> list[str]:
    """Builds the command of a process that calls `main` and can import these packages, too."""
    folders = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folders.append(str(Path(spec.origin).parents[1]))
    return interpreter.isolated(main, dict.fromkeys(folders), *arguments)


def start(main: Callable[..., None], packages: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process that answers requests."""
    return subprocess.Popen(
        command(main, packages),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def request(child: subprocess.Popen[bytes], content: dict[str, Any]) -> None:
    """Sends a request. A process that has ended is seen when its answer is read."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(content).encode() + b"\n")
        child.stdin.flush()


def stop(child: subprocess.Popen[bytes]) -> None:
    """Ends a process, and drops what it has written."""
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]


# From here on: the child


def forbid(*kinds: int) -> None:
    """Sets these limits, such as the number of files, and that of core files to 0 for good.

    Ctrl-C is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for kind in (*kinds, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))


def limit(limits: Mapping[int, int], for_good: bool = True) -> None:
    """Sets limits; not `for_good`: the process may raise them again."""
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # unknown to the system, or above its own
            _, hard_limit = resource.getrlimit(kind)
            resource.setrlimit(kind, (most, most if for_good else hard_limit))


def address_space() -> int:
    """The bytes of memory that this process has, with the code of libraries; 0 where that is not
    known.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def requests() -> Iterator[Any]:
    """Yields the parent's requests, until there are no more."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def send(answer: dict[str, Any]) -> None:
    """Writes a line of JSON for the parent, who gets it with the next flush."""
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
