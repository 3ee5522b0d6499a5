"""Resume compatibility: the settings that a config must share with the checkpoint it resumes from.

What it is: the model's shape must be the same, because its tensors would not fit. Data, seed, sequence length and
optimizer settings must be the same because the losses would differ; a change of these can be accepted by name, and
later checkpoints then contain the new values. Everything else may change: layout, number of processes, precision,
schedule, number of steps, how often to save.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest
from titanlite.checkpoint.manifest_reader import read_file
from titanlite.config.load import ACCEPTABLE
from titanlite.config.schema import CheckpointConfig, ConfigError


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
