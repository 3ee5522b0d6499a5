"""metrics.jsonl of an earlier attempt: a resumed run removes the lines after its step.

What it costs: the file is read once, when the run starts in a folder that has one.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from titanlite.config.files import read_bounded, replace_file

MAX_BYTES = 1 << 29  # some 1.5 million lines


def truncate_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step` of a metrics file, and drops lines that are damaged."""
    if not path.exists():
        return
    content, lines = read_bounded(path, MAX_BYTES), []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                lines.append(line + b"\n")
    kept = b"".join(lines)
    if content.startswith(kept):
        with path.open("r+b") as file:  # needs no room, which a full disk does not have
            os.ftruncate(file.fileno(), len(kept))  # if a signal interrupts it, Python repeats it
    else:
        replace_file(path, kept)
