"""metrics.jsonl as a file: removes lines at a resume, and follows the file as it grows.

What it costs: the files are read once, line by line, when the run starts in a folder that has them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file

LONGEST = 1 << 20  # bytes of a line; a longer line counts as damaged
SAMPLES = "samples.jsonl"  # written by `samples.py`
EVALUATIONS = "evaluations.jsonl"  # written by `titanlite evaluate`
# Written by `sinks/feed.py`: the run's id in W&B and MLflow, the same after each resume
RUN_ID = "sinks_id"


def drop_later_lines(folder: Path, step: int) -> None:
    """Removes lines after `step` from a run's metrics.jsonl and samples.jsonl, if it has them.

    A `step` below 0 means that the run begins again: it also removes the run's id in W&B and MLflow
    and its evaluations.
    """
    if step < 0:
        for name in (RUN_ID, EVALUATIONS):
            (folder / name).unlink(missing_ok=True)
    for name in ("metrics.jsonl", SAMPLES):
        if (folder / name).exists():
            truncate_after(folder / name, step)


def truncate_after(path: Path, step: int) -> None:
    """Removes lines after `step` from a metrics file, and damaged lines."""
    if not path.is_file() and not path.is_dir():  # a folder is an error of `open`
        raise ConfigError(f"{path}: expected a regular file")
    end = 0  # bytes before the first dropped line
    later = []  # kept lines after the first dropped one
    dropped = False
    with path.open("r+b") as file:
        for line in iter(lambda: file.readline(LONGEST), b""):
            keep = False
            with contextlib.suppress(ValueError, KeyError, TypeError):
                keep = line.endswith(b"\n") and parse_json(line)["step"] <= step
            if not keep:
                dropped = True
            elif dropped:
                later.append(line)
            else:
                end += len(line)
        if not later:
            os.ftruncate(file.fileno(), end)  # works on a full disk
            return
        file.seek(0)
        beginning = file.read(end)
    replace_file(path, beginning + b"".join(later))


class RowReader:
    """Reads the rows of a metrics file in order while another thread appends to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0  # bytes read so far
        self._last = b""  # the last line read

    def read(self, most: int = 1000) -> list[dict[str, Any]] | None:
        """Reads the next rows, at most `most`; [] if there is none yet.

        Returns None if a rollback has removed lines that were read. It notices this because the
        last line read is absent or different: each line has its time.
        """
        rows: list[dict[str, Any]] = []
        if not self.path.exists():
            if self.position > 0:
                return None
            return rows
        with self.path.open("rb") as file:
            file.seek(self.position - len(self._last))
            if file.read(len(self._last)) != self._last:
                return None
            while len(rows) < most:
                line = file.readline(LONGEST)
                if not line:
                    break
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    break  # the line is still being written
                self.position += len(line)
                self._last = line
                # Skip damaged lines
                with contextlib.suppress(ValueError):
                    row = parse_json(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        rows.append(row)
        return rows
