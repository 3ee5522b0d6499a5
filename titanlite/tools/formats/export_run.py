"""Exports the model of a finished run for other software: `checkpoint.export`.

What it is: `titanlite convert` of the newest checkpoint into the run's folder. The new export then
takes the place of that of an earlier end of the run; where it cannot be written, the earlier one
stays. A kill between two renames leaves none, and `titanlite convert` writes it.
What it costs: reading and writing the model once, and the comparison of the two; until then the
disk space of both exports.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import sync_folder
from titanlite.tools.formats.convert import convert
from titanlite.tools.formats.export import Options
from titanlite.tools.formats.output_path import remove

logger = logging.getLogger("titanlite")
TARGETS = {"hf": "export-hf", "torch": "model.pt", "peft": "export-peft"}
NAMES = (  # of the files in an export's folder
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "README.md",  # of earlier releases
    "adapter_config.json",
    "adapter_model.safetensors",
)


def export_run(folder: Path, form: str) -> None:
    """Writes the model into the run's folder. What goes wrong is a warning: the checkpoint is
    complete.
    """
    target = folder / TARGETS[form]
    beside = folder / "titanlite-tmp-export"
    remove(beside)  # of a run that was killed
    try:
        _require_an_export(target)
        new = beside / target.name
        convert(folder, new, Options(to=form))
        if target.exists():
            target.rename(beside / "earlier")
        new.rename(target)
        sync_folder(folder)
    except Exception as error:  # also of torch and safetensors
        stays = ""
        if target.exists():
            stays = ", and an earlier one stays"
        logger.warning(
            "checkpoint.export = %s: %s was not written%s: %s", form, target, stays, error
        )
    finally:
        remove(beside)


def _require_an_export(target: Path) -> None:
    """Raises ConfigError if the folder of an earlier export has other files."""
    if not target.is_dir():
        return
    for name in sorted(os.listdir(target)):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in NAMES):
            raise ConfigError(f"{target}: holds {name}, which is not of an export; move it")
