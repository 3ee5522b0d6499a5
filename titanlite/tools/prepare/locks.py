"""Which processes may work on a prepared folder at the same time.

What it is: `hold(folder)` admits one process, or with `shared` any number that make separate parts.
It locks the file `.NAME.lock` beside the folder, which the last process removes. The system frees
the lock of a process that is killed. Where the file system has no locks, each process instead
creates a file that names it (computer and process), and then looks for those of others. As it
creates its file before it looks, two that exclude each other cannot both go on. A file is removed
if its process ran on this computer and has ended; of one on another computer, that cannot be
determined, so the message names the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import NO_LOCKS, make_folder

POLL = 0.2  # seconds between two attempts, at most
ATTEMPTS = 5  # before a process gives up: two that start at the same moment exclude each other

Log = Callable[[str], None]


@contextlib.contextmanager
def hold(folder: Path, shared: bool = False, wait: Log | None = None) -> Iterator[None]:
    """Keeps processes away that must not work on a folder at the same time; `shared` ones admit
    each other.

    `wait`: wait for them, and log which process works there; without it they are a ConfigError.
    Raises OSError if no file can be made.
    """
    make_folder(folder.parent)
    path = folder.with_name(f".{folder.name}.lock")
    try:
        descriptor = _lock(path, shared, wait is not None)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        path.unlink(missing_ok=True)
        mark = _announce(path, shared, wait)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # other processes share the lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, shared: bool, wait: bool) -> int:
    """The descriptor of the locked file."""
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, operation)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise _refusal(path, "another process") from None
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, FileNotFoundError):
                raise
        else:
            os.close(descriptor)  # the process before this one has removed the file


def _announce(path: Path, shared: bool, wait: Log | None) -> Path:
    """The file that stands for this process, on a file system without locks."""
    kind = "shared" if shared else "alone"
    logged = False
    for attempt in itertools.count(1):
        mark = path.with_name(
            f"{path.name}-{kind}-{os.getpid()}-{secrets.token_hex(4)}-{socket.gethostname()}"
        )
        mark.touch(exist_ok=False)
        try:
            other = _other(path, mark, shared)
        except BaseException:
            mark.unlink(missing_ok=True)
            raise
        if other is None:
            return mark
        mark.unlink()
        if attempt >= ATTEMPTS:
            _, process, _, host = _parts(path, other)
            if wait is None:
                raise _refusal(
                    path,
                    f"process {process} on {host}",
                    f", or delete {other} if that process has ended",
                )
            if not logged:
                wait(f"waiting for process {process} on {host}; if it has ended, delete {other}")
                logged = True
        time.sleep(POLL * random.random())
    raise AssertionError("unreachable")


def _other(path: Path, mark: Path, shared: bool) -> Path | None:
    """The file of a process that excludes this one. Removes files of processes that have ended."""
    for name in sorted(os.listdir(path.parent)):
        other = path.with_name(name)
        if name == mark.name or not re.match(
            rf"{re.escape(path.name)}-(shared|alone)-\d+-\w+-.", name
        ):
            continue
        kind, process, _, host = _parts(path, other)
        if host == socket.gethostname() and not _runs(int(process)):
            other.unlink(missing_ok=True)
        elif not (shared and kind == "shared"):
            return other
    return None


def _parts(path: Path, mark: Path) -> list[str]:
    """Kind, process, random letters, and computer."""
    return mark.name.removeprefix(f"{path.name}-").split("-", 3)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return True


def _refusal(path: Path, who: str, advice: str = "") -> ConfigError:
    folder = path.with_name(path.name[1:].removesuffix(".lock"))
    return ConfigError(f"{folder}: {who} works in this folder; wait for it{advice}")
