"""The run's folder: locked by one run at a time, and the same folder on all nodes.

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
from typing import Any

from titanlite.distributed.agreement import broadcast_from_rank0, require_agreement
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import NO_LOCKS, make_folder, read_bounded

logger = logging.getLogger("titanlite")


def claim_folder(folder: Path) -> Any:
    """Creates the run's folder and locks it as long as the returned object lives. All ranks call it
    together.

    Raises ConfigError on all ranks if the folder cannot be written, another run holds its lock, or
    a rank sees another folder under the same path (checkpoints need one that all nodes share).
    """
    held: list[Any] = []

    def lock_with_token() -> str:
        try:
            make_folder(folder)
            file = lock(folder / ".lock")
            os.ftruncate(file.fileno(), 0)  # repeated by Python if a signal interrupts it
            file.write(token := secrets.token_hex(8))
            file.flush()
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another run is training in this folder; wait for it or choose another run.name"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"run.folder, run.name: {folder}: {reason}; expected a writable folder"
            ) from None
        held.append(file)
        return token

    token = broadcast_from_rank0(lock_with_token)
    require_agreement(folder=_read_token(folder / ".lock", token))
    return held


def lock(path: Path) -> Any:
    """Locks a file, which it creates if necessary, as long as the returned object lives.

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
    """The file's content. A network file system gets ten seconds to show the expected one."""
    content = ""
    deadline = time.monotonic() + 10
    while content != expected and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            content = read_bounded(path).decode("utf-8", "replace")
        if content != expected:
            time.sleep(0.1)
    return content
