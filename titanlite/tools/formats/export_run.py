"""Exports the model of a finished run for other software: `checkpoint.export`.

What it is: `titanlite convert` of the newest checkpoint into the run's folder. The export of an
earlier end of the run is removed before, so that no model of an earlier step lies beside the
checkpoint; a crash between the two leaves the run without an export, which `titanlite convert`
writes.
What it costs: reading and writing the model once, and the comparison of the two.
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
from titanlite.tools.formats.output_path import remove, temporary_path

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
    "adapter_config.json",
    "adapter_model.safetensors",
)


def export_run(folder: Path, form: str) -> None:
    """Writes the model into the run's folder. What goes wrong is a warning: the checkpoint is
    complete.
    """
    target = folder / TARGETS[form]
    try:
        _remove_earlier(target)
        convert(folder, target, Options(to=form))
    except Exception as error:  # also of torch and safetensors
        logger.warning("checkpoint.export = %s: %s was not written: %s", form, target, error)


def _remove_earlier(target: Path) -> None:
    """Removes the export of an earlier end of the run. Raises ConfigError if it has other files."""
    if not target.exists():
        return
    if target.is_dir():
        for name in sorted(os.listdir(target)):
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in NAMES):
                raise ConfigError(f"{target}: holds {name}, which is not of an export; move it")
    earlier = temporary_path(target)  # of which a kill leaves no part under the target's name
    target.rename(earlier)
    sync_folder(target.parent)
    remove(earlier)
