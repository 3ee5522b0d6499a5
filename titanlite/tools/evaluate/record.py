"""Writes evaluations.jsonl in a run's folder: one line per evaluation of a checkpoint.

Why it is not a part of metrics.jsonl: a run appends to that file in the order of the steps, and a
resumed run removes the rows after its checkpoint. An evaluation can be made at any time, of any
step. The report reads both files.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from titanlite.observe.metrics_file import EVALUATIONS
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.full_state import FullState


def run_folder_of(full: FullState) -> Path | None:
    """The run's folder that contains a checkpoint; None for a checkpoint elsewhere."""
    run = full.path.parent.parent
    of_run = full.about.format == "titanlite"
    if full.sources:  # of a model with adapters: the run that trained these
        of_run = full.path == full.sources[1].path
    return run if of_run and (run / "metrics.jsonl").is_file() else None


def append(
    folder: Path, step: int, weights: str, results: dict[str, float], settings: dict[str, Any]
) -> Path:
    """Adds a line with `results`: evaluate/<set>/<metric> -> value.

    One write appends the whole line, so simultaneous evaluations do not mix. Raises ConfigError if
    it cannot be written.
    """
    path = folder / EVALUATIONS
    finite = {name: value if math.isfinite(value) else None for name, value in results.items()}
    row = {"step": step, "time": time.time(), "weights": weights, "settings": settings, **finite}
    try:
        with path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            begin = b"\n" * (file.read(1) not in (b"", b"\n"))  # after a line that was cut off
            file.write(begin + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; the results above are not recorded"
        ) from None
    return path
