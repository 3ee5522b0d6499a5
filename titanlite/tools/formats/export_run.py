"""Exports the model of a finished run for other software: `checkpoint.export`.

What it is: `titanlite convert` of the newest checkpoint into the run's folder, which replaces the
export of an earlier end of the run.
What it costs: reading and writing the model once, and the comparison of the two.
"""

from __future__ import annotations

import logging
from pathlib import Path

from titanlite.tools.formats.convert import convert
from titanlite.tools.formats.export import Options

logger = logging.getLogger("titanlite")
TARGETS = {"hf": "export-hf", "torch": "model.pt", "peft": "export-peft"}


def export_run(folder: Path, form: str) -> None:
    """Writes the model into the run's folder. What goes wrong is a warning: the checkpoint is
    complete.
    """
    target = folder / TARGETS[form]
    try:
        convert(folder, target, Options(to=form, force=True))
    except Exception as error:  # also of torch and safetensors
        logger.warning("checkpoint.export = %s: %s was not written: %s", form, target, error)
