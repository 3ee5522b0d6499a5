"""Lets one process at a time work on a file or folder, by a locked file beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from titanlite.runtime.files import NO_LOCKS


@contextlib.contextmanager
def lock_file(path: Path, wait: bool = False) -> Iterator[None]:
    """Makes and locks the file `path`, and removes it at the end of the context.

    `wait`: waits for a process that holds the lock; otherwise there is a BlockingIOError. Where the
    file system has no locks, processes are not kept apart.
    """
    descriptor = _lock(path, wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the next process locks and removes it
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, wait: bool) -> int:
    """The descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The process that held it may have removed the file; then another file has the name
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # removed, and no other has the name yet
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
