"""The run's folder: only one run may hold it, and all nodes must see the same folder.

What it is: a lock file that rank 0 holds while it trains. It contains a random token, which every
other rank must read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from pathlib import Path
from typing import TextIO

from titanlite.config.schema import RunConfig
from titanlite.distributed.agreement import broadcast_from_rank0, require_agreement
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import NO_LOCKS, make_folder, read_bounded, replace_file

logger = logging.getLogger("titanlite")


class RunFolder:
    """The folder of a run, locked as long as this object lives."""

    def __init__(self, config: RunConfig) -> None:
        """Creates the folder and locks it. All ranks call it together.

        Raises ConfigError on all ranks if the folder cannot be written, another run holds its lock,
        or a rank sees another folder under the same path (checkpoints need one that all nodes
        share).
        """
        self.path = Path(config.folder, config.name)
        self._lock: TextIO | None = None  # held by rank 0
        token = broadcast_from_rank0(self._lock_with_token)
        require_agreement(folder=_read_token(self.path / ".lock", token))

    def _lock_with_token(self) -> str:
        """Locks the folder and writes a new token into the lock file. Runs on rank 0."""
        token = secrets.token_hex(8)
        try:
            make_folder(self.path)
            file = lock(self.path / ".lock")
            os.ftruncate(file.fileno(), 0)  # Python repeats the call if a signal interrupts it
            file.write(token)
            file.flush()
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another run is training in this folder; wait for it or choose "
                "another run.name"
            ) from None
        except OSError as error:
            problem = error.strerror or error
            raise ConfigError(
                f"run.folder, run.name: {self.path}: {problem}; expected a writable folder"
            ) from None
        self._lock = file
        return token

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder on rank 0; raises an error on all ranks."""
        broadcast_from_rank0(lambda: replace_file(self.path / name, text.encode()))


def lock(path: Path) -> TextIO:
    """Creates a file if necessary, and locks it for as long as the returned object lives.

    Raises BlockingIOError.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s: the file system has no locks; only one run at a time may use this folder", path
        )
    return file


def _read_token(path: Path, expected: str) -> str:
    """Reads the file; gives a network file system ten seconds to show the expected content."""
    content = ""
    deadline = time.monotonic() + 10
    while content != expected and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            content = read_bounded(path).decode("utf-8", "replace")
        if content != expected:
            time.sleep(0.1)
    return content
