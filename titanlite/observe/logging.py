"""Logging: the ranks in LOG_RANK (default 0) print all messages, the others only warnings.

What it is: the set-up of Python's logger `titanlite`. Rank 0 also writes every message to log.txt
in the run's folder, debug messages included, which the console shows only with LOG_LEVEL=debug.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from titanlite.observe.line_file import LineFileHandler

logger = logging.getLogger("titanlite")


def setup_logging(rank: int) -> None:
    """Sends messages to the console. LOG_RANK is a comma-separated list of ranks."""
    # Print no stack trace for each line if the console is closed (`| head`)
    logging.raiseExceptions = False
    logger.handlers.clear()
    logger.propagate = False
    # DTensor warns that it gathers because gloo has no all-to-all: expected here.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    logger.setLevel(logging.DEBUG)
    prefix = ""
    if rank != 0:
        prefix = f"[rank {rank}] "
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    shown = {word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")}
    if str(rank) not in shown:
        console.setLevel(logging.WARNING)
    elif os.environ.get("LOG_LEVEL", "").lower() == "debug":
        console.setLevel(logging.DEBUG)
    else:
        console.setLevel(logging.INFO)
    logger.addHandler(console)


def log_to_file(path: Path) -> None:
    """Appends messages, with times, to a file. Raises OSError if it cannot be opened."""
    # Fail at once if the path is a pipe, instead of waiting for its reader
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
    file = LineFileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
