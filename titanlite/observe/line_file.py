"""A text file to which lines are appended, and which a full disk does not stop.

What it is: metrics.jsonl and log.txt. If a line cannot be written, it waits in memory, one warning is logged, and the
next lines are appended after it as soon as the disk takes them. A line is in the file completely or not at all.
Why it is here: a run must not end because a line about it cannot be written.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

logger = logging.getLogger("titanlite")
MAX_WAITING = 100_000  # lines; older ones are dropped


class LineFile:
    """Appends to the file at `path`, which is opened for each line: it may be moved away or on another disk by then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._warned = False

    def append(self, line: str) -> None:
        """Appends a line, after those that wait. Raises nothing."""
        self._waiting = [*self._waiting, line][-MAX_WAITING:]
        try:
            self._write("".join(f"{text}\n" for text in self._waiting).encode("utf-8", "replace"))
        except OSError as error:
            if not self._warned:  # set first, because the warning itself may be a line of this file
                self._warned = True
                logger.warning("%s: %s; lines wait in memory until it can be written", self.path, error.strerror)
            return
        self._waiting = []
        if self._warned:
            self._warned = False
            logger.info("%s is written again", self.path)

    def _write(self, content: bytes) -> None:
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while content:
                    content = content[file.write(content) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)  # a line that is cut off would damage the next one
                raise


class LineFileHandler(logging.Handler):
    """Appends log records to a `LineFile`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = LineFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.append(self.format(record))
