"""A text file of lines; while the disk is full, lines are kept in memory.

What it is: the writer of metrics.jsonl, log.txt, events.jsonl and samples.jsonl. A failed write is
undone and tried again once. If that fails too, one warning is logged, and the line waits in memory
until a later write succeeds. At most 100,000 lines wait; older ones are dropped. A kill may still
cut the last line.
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
    """Appends lines to the file at `path`, which may be moved: it is opened for each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._warned = False

    def append(self, line: str) -> None:
        """Appends a line after those that wait. Raises nothing."""
        self._waiting = [*self._waiting, line][-MAX_WAITING:]
        content = "".join(f"{text}\n" for text in self._waiting).encode("utf-8", "replace")
        try:
            try:
                self._write(content)
            except OSError:
                # Try again at once: no later write may follow the last line of a run
                self._write(content)
        except OSError as error:
            if not self._warned:  # the warning itself may be a line of this file
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
            # with O_NONBLOCK a pipe is an error, instead of a wait for its reader
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
                while content:
                    content = content[os.write(file.fileno(), content) :]
        except OSError:  # also from close, where a network file system reports a quota
            with contextlib.suppress(OSError):
                os.truncate(self.path, end)  # a partial line would damage the next one
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
                for name in ("event", "step", "about"):  # a signal's event has no step
                    if hasattr(record, name):
                        event[name] = getattr(record, name)
                event["text"] = record.getMessage()
                self.events.append(json.dumps(event))
        except Exception:  # a message that cannot be formatted
            self.handleError(record)
