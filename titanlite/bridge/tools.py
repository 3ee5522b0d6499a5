"""The functions of `tools/` that a run uses, and what it does without that folder.

What it is: one function for each use. Preparing text, weights in other formats and adapters need
the tools: without them, such a run is refused with an error. The report and the export only add to
a run: without the tools they are left out.
Why it is here: `tools/` can be deleted, and `train.py` still trains, resumes and validates prepared
data. `find` is the only place where the core imports from it.
What it costs: nothing before it is used.
"""

from __future__ import annotations

import json
import logging
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from titanlite.checkpoint.state import ModelState, every_name
from titanlite.config.schema import FROM_CHECKPOINT, Config, DataConfig
from titanlite.data.prepared import open_prepared
from titanlite.distributed.agreement import PATIENT, broadcast, broadcast_from_rank0
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.lora import is_frozen
from titanlite.runtime.errors import LAUNCHED, ConfigError
from titanlite.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("titanlite")


def find(name: str) -> ModuleType | None:
    """Imports titanlite.tools.`name`; returns None without the tools."""
    if find_spec("titanlite.tools") is None:
        return None
    return import_module(f"titanlite.tools.{name}")


def require(name: str, purpose: str) -> ModuleType:
    """Imports titanlite.tools.`name`. Raises ConfigError without the tools."""
    module = find(name)
    if module is None:
        raise ConfigError(f"{purpose} needs titanlite/tools, which is not there")
    return module


def adopt_model(config: Config) -> Config:
    """Replaces `model.flavor = from_checkpoint` by the keys of that checkpoint's model."""
    if config.model.flavor != FROM_CHECKPOINT:
        return config
    adopt = require("formats.adopt", f"model.flavor = {FROM_CHECKPOINT}")
    adopted: Config = adopt.adopt_checkpoint(config)
    return adopted


def prepared_folders(section: DataConfig, tokenizer: Tokenizer) -> list[Path]:
    """Returns each source's prepared folder: from the launcher, or found or prepared here.

    Raises ConfigError with what is missing or damaged.
    """
    if LAUNCHED in os.environ:
        return [Path(folder) for folder in json.loads(os.environ[LAUNCHED])]
    folders = []
    for part in section.parts():
        folder = open_prepared(part)
        if folder is None:
            cache = require("prepare.cache", f"data.path = {part.path!r}: preparing text")
            folder = cache.prepare(part, tokenizer, logger.info)
        folders.append(folder)
    return folders


def frozen_fingerprint(config: Config) -> str:
    """Computes the fingerprint of the weights under adapters; empty without adapters."""
    if config.lora.rank == 0:
        return ""
    path = Path(config.checkpoint.initial_load)
    adopt = require("formats.adopt", "checkpoint.initial_load")
    return broadcast_from_rank0(lambda: str(adopt.fingerprint_of(path)))


def load_initial_weights(
    config: Config,
    model_parts: list[Llama],
    llama: LlamaConfig,
    tokenizer: Tokenizer,
    resumed: bool,
) -> None:
    """Loads the weights that `checkpoint.initial_load` names: another run's, or a file in any
    format that `titanlite convert` reads.

    A resumed run has its weights from its checkpoint, except for frozen weights under adapters.
    """
    path = config.checkpoint.initial_load
    adapted = config.lora.rank > 0
    if path and (adapted or not resumed):
        state = ModelState(model_parts, is_frozen if adapted else every_name)
        weights = require("formats.load_weights", "checkpoint.initial_load")
        weights.load_weights(config.checkpoint, state, llama, tokenizer)


def write_report(folder: Path) -> None:
    """Writes the report on rank 0 while the others wait: when a process exits, a launcher may end
    the others.
    """
    if dist.get_rank() == 0:
        page = find("report.page")
        if page is not None:
            page.write_report(folder)
    broadcast(None, PATIENT)


def write_export(config: Config, folder: Path, step: int) -> None:
    """Writes the model of a finished run on rank 0 in the format of `checkpoint.export`, if any.

    The run has ended and its checkpoint is complete, so an error is only a warning.
    """
    if config.checkpoint.export == "none" or step < config.training.steps:
        return
    if dist.get_rank() == 0:
        export = find("formats.export_run")
        if export is None:
            logger.warning("checkpoint.export needs titanlite/tools, which is not there")
        else:
            export.export_run(folder, config.checkpoint.export)
    broadcast(None, PATIENT)
