"""A text file of lines; while the disk is full, lines are kept in memory.

What it is: metrics.jsonl, log.txt, events.jsonl and samples.jsonl. A failed write is undone and
tried again once. If that fails too, one warning is logged, and the line is written before the next
one as soon as there is room. At most 100,000 lines are kept, until the run ends; older ones are
dropped. A kill may still cut the last line.
Why it is here: a run must not end because a line about it cannot be written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger("titanlite")
MAX_WAITING = 100_000  # lines; older ones are dropped


class LineFile:
    """Appends to the file at `path`, which is opened for each line: it may be moved away or on
    another disk by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._warned = False

    def append(self, line: str) -> None:
        """Appends a line, after those that wait. Raises nothing."""
        self._waiting = [*self._waiting, line][-MAX_WAITING:]
        content = "".join(f"{text}\n" for text in self._waiting).encode("utf-8", "replace")
        try:
            try:
                self._write(content)
            except OSError:
                # The last line of a run has no later one, before which it could be written
                self._write(content)
        except OSError as error:
            if not self._warned:  # set first, because the warning itself may be a line of this file
                self._warned = True
                logger.warning(
                    "%s: %s; lines are kept in memory until it can be written",
                    self.path,
                    error.strerror,
                )
            return
        self._waiting = []
        if self._warned:
            self._warned = False
            logger.info("%s is written again", self.path)

    def _write(self, content: bytes) -> None:
        end = self.path.stat().st_size if self.path.exists() else 0
        try:
            # a pipe is an error, and not waited for
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
                while content:
                    content = content[os.write(file.fileno(), content) :]
        except OSError:  # also of the closing, where a network file system reports a quota
            with contextlib.suppress(OSError):
                os.truncate(self.path, end)  # a line that is cut off would damage the next one
            raise


class LineFileHandler(logging.Handler):
    """Appends log records to a `LineFile`; events (`extra={"event": name}`) to events.jsonl too."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = LineFile(path)
        self.events = LineFile(path.with_name("events.jsonl"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.append(self.format(record))
            if hasattr(record, "event"):  # for `titanlite report`
                event: dict[str, Any] = {"time": record.created}
                for name in ("event", "step", "about"):  # a signal does not know its step
                    if hasattr(record, name):
                        event[name] = getattr(record, name)
                event["text"] = record.getMessage()
                self.events.append(json.dumps(event))
        except Exception:  # a message that cannot be formatted
            self.handleError(record)
