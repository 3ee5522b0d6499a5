"""metrics.jsonl as a file: lines that a resumed run removes, and a reader that follows the file.

What it costs: the files are read once, line by line, when the run starts in a folder that has them.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file

LONGEST = 1 << 20  # bytes of a line; what is longer is damaged
SAMPLES = "samples.jsonl"  # of `samples.py`
EVALUATIONS = "evaluations.jsonl"  # of `titanlite evaluate`
# Of `sinks/feed.py`: the run's name in W&B and MLflow, the same after each resume
RUN_ID = "sinks_id"


def drop_later_lines(folder: Path, step: int) -> None:
    """Keeps the lines up to `step` of a run's metrics.jsonl and, if it has one, of its
    samples.jsonl.

    Below 0 none: the run begins again, is another one in W&B and MLflow, and has not been
    evaluated.
    """
    if step < 0:
        for name in (RUN_ID, EVALUATIONS):
            (folder / name).unlink(missing_ok=True)
    truncate_after(folder / "metrics.jsonl", step)
    if (folder / SAMPLES).exists():
        truncate_after(folder / SAMPLES, step)


def truncate_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step` of a metrics file, and drops lines that are damaged."""
    if not path.is_file() and not path.is_dir():  # which is an error of `open`
        raise ConfigError(f"{path}: expected a regular file")
    end = 0  # bytes before the first line that is dropped
    later = []  # lines after it that stay
    dropped = False
    with path.open("r+b") as file:
        for line in iter(lambda: file.readline(LONGEST), b""):
            keep = False
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                keep = line.endswith(b"\n") and json.loads(line)["step"] <= step
            if not keep:
                dropped = True
            elif dropped:
                later.append(line)
            else:
                end += len(line)
        if not later:
            os.ftruncate(file.fileno(), end)  # needs no room, which a full disk does not have
            return
        file.seek(0)
        beginning = file.read(end)
    replace_file(path, beginning + b"".join(later))


class RowReader:
    """Reads the rows of a metrics file in order while another thread appends to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0  # bytes that were read
        self._last = b""  # the line before the position

    def read(self, most: int = 1000) -> list[dict[str, Any]] | None:
        """The next rows, at most `most`; [] if there is none yet.

        None: lines that were read were removed since, by a rollback. Then the last one that was
        read is absent or another one, because each line has its time.
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
                    break  # it is being written
                self.position += len(line)
                self._last = line
                # A damaged line has no number of a step either
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        rows.append(row)
        return rows
