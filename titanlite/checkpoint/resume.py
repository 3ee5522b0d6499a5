"""Resuming: from which checkpoint a run continues, and which settings it must share with it.

What it is: the newest checkpoint that is complete, intact and finite; others are renamed on the way to it. The model's
shape must be the same, because its tensors would not fit. Data, seed, sequence length and optimizer settings must be
the same because the losses would differ; a change of these can be accepted by name, and later checkpoints then contain
the new values. Everything else may change: layout, number of processes, precision, schedule, number of steps, how often
to save.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest
from titanlite.checkpoint.manifest_reader import read_file
from titanlite.checkpoint.read import verify_together
from titanlite.checkpoint.retention import Retention
from titanlite.checkpoint.storage import list_steps, set_aside, step_folder
from titanlite.config.load import ACCEPTABLE
from titanlite.config.schema import CheckpointConfig, ConfigError
from titanlite.distributed.agreement import broadcast_from_rank0

logger = logging.getLogger("titanlite")


def newest_usable(folder: Path, config: CheckpointConfig, retention: Retention, group: Any) -> tuple[Path, Manifest]:
    """The newest checkpoint that is intact and finite, or that of `checkpoint.load_step`. All ranks call it together.

    Raises ConfigError if none is usable.
    """
    steps: list[int] = broadcast_from_rank0(lambda: list_steps(folder))
    for step in reversed(_candidates(folder, steps, config.load_step, retention) if config.load_step else steps):
        path = step_folder(folder, step)
        if manifest := _usable(path, group):
            return path, manifest
    if back_to := config.load_step:
        left = ", ".join(str(step) for step in steps if step != back_to) or "none"
        raise ConfigError(f"checkpoint.load_step = {back_to}: it is damaged or not finite; other steps: {left}")
    found = broadcast_from_rank0(lambda: sorted(path.name for path in folder.glob("step-*.*")))
    raise ConfigError(
        f"{folder}: no checkpoint is complete and finite, and a new run cannot start in a folder with "
        f"{', '.join(found)}; choose another run.name, or move these folders away"
    )


def _candidates(folder: Path, steps: list[int], back_to: int, retention: Retention) -> list[int]:
    """`checkpoint.load_step` and the steps saved later with this setting, the preferred one last.

    So a command with `load_step`, if repeated, resumes from its latest save. Raises ConfigError if there is none.
    """

    def saved_since(step: int) -> bool:
        manifest = retention.read(step)
        return manifest is not None and manifest.config.get("checkpoint", {}).get("load_step") == back_to

    later: list[int] = broadcast_from_rank0(lambda: [step for step in steps if step > back_to and saved_since(step)])
    if back_to not in steps and not later:  # the step itself may have been deleted since
        allowed = ", ".join(map(str, steps)) or "none, the run has no checkpoint"
        raise ConfigError(f"checkpoint.load_step = {back_to}: not in {folder}; allowed: {allowed}")
    if later:
        logger.info("checkpoint.load_step = %d: resuming from a step that was saved since", back_to)
    return [back_to, *later] if back_to in steps else later


def _usable(path: Path, group: Any) -> Manifest | None:
    """The manifest of a checkpoint, after verification; if it is unusable, logs the reasons and renames the folder."""
    try:
        manifest = verify_together(path, group=group)
        problems, why = [] if manifest.finite else [f"{path}: contains NaN or infinity"], "nonfinite"
    except CorruptCheckpoint as error:
        problems, why = error.problems, "damaged"
    if not problems:
        return manifest
    for problem in problems if dist.get_rank() == 0 else ():
        logger.warning("%s: %s", why, problem)
    logger.warning("%s: renamed to %s", path, broadcast_from_rank0(lambda: str(set_aside(path, why))))
    return None


def set_aside_later(folder: Path, step: int) -> None:
    """Renames the checkpoints that are newer than the step from which the run continues. All ranks call it together."""

    def rename() -> list[list[Any]]:
        later = [other for other in list_steps(folder) if other > step]
        return [[other, str(set_aside(step_folder(folder, other), "superseded"))] for other in later]

    for other, aside in broadcast_from_rank0(rename):
        logger.info("step %d is newer than the resumed step: renamed to %s", other, aside)


def require_compatible(
    folder: Path,
    manifest: Manifest,
    config: dict[str, dict[str, Any]],
    files: dict[str, bytes],
    section: CheckpointConfig,
) -> None:
    """Raises ConfigError with every setting in which the checkpoint contradicts the current `config` and `files`."""
    try:
        saved = {name: read_file(folder, manifest, name) for name in ("model.json", "data.json")}
        was = _compatibility_settings(manifest.config, saved)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(f"{folder}: {error!r}; the checkpoint is damaged") from None
    now = _compatibility_settings(config, files)
    changed = [key for key in now if was.get(key, now[key]) != now[key] and key not in section.accepted]
    if not changed:
        return
    names = {"data": "the data (its path, pattern or tokenizer, or the Python version)"}
    problems = [f"{folder}: {names.get(key, key)} was {was.get(key)} and is {now[key]}" for key in changed]
    if fixed := [key for key in changed if key not in ACCEPTABLE]:
        what = "start a new run (another run.name), with checkpoint.initial_load if its weights fit"
        problems.append(f"{', '.join(fixed)}: cannot change within a run; {what}")
    else:
        accepted = ",".join(sorted({*section.accepted, *changed}))
        problems.append(f"to resume with the new values: --checkpoint.accept={accepted}; else choose another run.name")
    raise ConfigError(problems)


def _compatibility_settings(config: dict[str, dict[str, Any]], files: dict[str, bytes]) -> dict[str, Any]:
    """Key -> value of the settings that must be the same."""
    settings = {f"model.{name}": value for name, value in json.loads(files["model.json"]).items()}
    for key in ACCEPTABLE:
        section, _, name = key.partition(".")
        if name in config.get(section, {}):  # a checkpoint may be older than the key
            settings[key] = json.loads(json.dumps(config[section][name]))  # a tuple is a list in a manifest
    data = json.loads(files["data.json"])
    settings["data"] = f"{data['name']} ({data['bytes']} bytes, fingerprint {data['fingerprint'][:8]})"
    return settings


def training_changes(was: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Settings that may change, but change how the run trains: one `key old -> new` each."""
    found = []
    for section in ("training", "optimizer", "schedule", "float8"):
        for key, value in json.loads(json.dumps(now[section])).items():
            if (before := was.get(section, {}).get(key, value)) != value:
                found.append(f"{section}.{key} {before} -> {value}")
    return found
