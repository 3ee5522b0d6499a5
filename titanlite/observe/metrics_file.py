"""metrics.jsonl and samples.jsonl as files: lines that a resumed run removes, and a reader that
follows a growing file.

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
RUN_ID = "sinks_id"  # of `sinks.py`: the run's name in W&B and MLflow, the same after each resume


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
    # `end`: bytes before the first line that is dropped; `later`: kept after it
    end = 0
    later = []
    dropped = False
    with path.open("r+b") as file:
        while line := file.readline(LONGEST):
            keep = False
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                keep = line.endswith(b"\n") and json.loads(line)["step"] <= step
            dropped |= not keep
            if keep and dropped:
                later.append(line)
            elif keep:
                end += len(line)
        if not later:
            os.ftruncate(file.fileno(), end)  # needs no room, which a full disk does not have
            return
        file.seek(0)
        kept = file.read(end)
    replace_file(path, kept + b"".join(later))


class RowReader:
    """Reads the rows of a metrics file in order while another thread appends to it."""

    def __init__(self, path: Path) -> None:
        # Bytes that were read
        self.path = path
        self.position = 0
        self._last = b""  # the line before the position

    def read(self, most: int = 1000) -> list[dict[str, Any]] | None:
        """The next rows, at most `most`; [] if there is none yet; None: lines that were read were
        removed since.

        Lines are removed by a rollback. The last one that was read is then absent or another one:
        it has its time.
        """
        rows: list[dict[str, Any]] = []
        if not self.path.exists():
            return None if self.position else rows
        with self.path.open("rb") as file:
            file.seek(self.position - len(self._last))
            if file.read(len(self._last)) != self._last:
                return None
            while len(rows) < most and (line := file.readline(LONGEST)):
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    break  # it is being written
                self.position += len(line)
                self._last = line
                # a damaged line has no number of a step either
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        rows.append(row)
        return rows
