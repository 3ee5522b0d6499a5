"""Lets one process at a time work on a file or folder, by a locked file beside it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import NO_LOCKS

logger = logging.getLogger("titanlite")


@contextlib.contextmanager
def lock_file(path: Path, busy: str, wait: bool = False) -> Iterator[None]:
    """Makes and locks the file `path`, and removes it at the end of the context.

    `wait`: waits for a process that holds the lock; otherwise it raises ConfigError with the
    message `busy`. Where the file system has no locks, it warns and goes on.
    """
    try:
        descriptor = _lock(path, wait)
    except BlockingIOError:
        raise ConfigError(busy) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the next process locks and removes it
            path.unlink()
        os.close(descriptor)


def _lock(path: Path, wait: bool) -> int:
    """Returns the descriptor of the locked file."""
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
                logger.warning("%s: the file system has no locks; use one process at a time", path)
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
