"""The run's folder: one run at a time writes into it, and all its processes see the same one.

What it is: a lock file that rank 0 holds as long as it trains, with a token in it that the others must read.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.config.schema import ConfigError
from titanlite.distributed.agreement import require_agreement


def claim_folder(folder: Path) -> Any:
    """Makes the run's folder and locks it; the lock lasts as long as the object returned.

    Raises ConfigError on all processes where it cannot be written, another run holds it, or some process sees
    another folder of that name (checkpoints need one that all nodes share).
    """
    claim: list[Any] = [None, ""]  # a token that only this run knows, or what is wrong
    held = None
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = lock(folder / ".lock")
            held.truncate(0)
            held.write(token := secrets.token_hex(8))
            held.flush()
            claim[0] = token
        except BlockingIOError:
            claim[1] = f"{folder}: another process is training here; wait for it or choose another run.name"
        except OSError as error:
            claim[1] = (
                f"run.folder, run.name: {folder}: {error.strerror or error}; expected a folder that can be written"
            )
    dist.broadcast_object_list(claim)
    if claim[1]:
        raise ConfigError(claim[1])
    require_agreement(folder=_read_token(folder / ".lock", claim[0]))
    return held


def lock(path: Path) -> Any:
    """Locks a file, making it if need be, for as long as the object returned lives. Raises BlockingIOError."""
    file = path.open("a+")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _read_token(path: Path, token: str) -> str:
    """The file's content; a network file system gets ten seconds to show the one expected."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError):
            if (content := path.read_text()) == token or time.monotonic() > deadline:
                return content
        if time.monotonic() > deadline:
            return "absent"
        time.sleep(0.1)
