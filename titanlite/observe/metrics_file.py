"""metrics.jsonl of an earlier attempt: a resumed run removes the lines after its step.

What it costs: the file is read once, line by line, when the run starts in a folder that has one.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from titanlite.config.files import replace_file
from titanlite.config.schema import ConfigError

LONGEST = 1 << 20  # bytes of a line; what is longer is damaged


def truncate_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step` of a metrics file, and drops lines that are damaged."""
    if not path.is_file() and not path.is_dir():  # which is an error of `open`
        raise ConfigError(f"{path}: expected a regular file")
    end, later, dropped = 0, [], False  # `end`: bytes before the first line that is dropped; `later`: kept after it
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
