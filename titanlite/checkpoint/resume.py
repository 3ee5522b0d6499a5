"""Resuming: from which checkpoint a run continues, and which settings must be equal.

What it is: a run resumes from the newest checkpoint that is complete, intact and finite; newer ones
are renamed. The model's shape must be the same, because its tensors would not fit. Settings with
`resume = "same"` in the schema (data, seed, sequence length, optimizer ...) must be the same, since
the losses would differ; a change of these can be accepted by name, and later checkpoints then
contain the new values. Others may change: layout, number of processes, precision, schedule, number
of steps, how often to save. The samples that the run had excluded (`divergence.py`) are in the
checkpoint's excluded.json, because the position in the data does not count them; so a copy of the
checkpoint, or a branch from it, reads the same samples next.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from titanlite.checkpoint.folders import list_steps, step_folder
from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest, Settings
from titanlite.checkpoint.planner import PlacementLoadPlanner
from titanlite.checkpoint.retention import Retention, set_aside
from titanlite.checkpoint.run_facts import RunFacts
from titanlite.checkpoint.shard_file import ShardFile
from titanlite.checkpoint.state import OptionalStateful, switched_on
from titanlite.checkpoint.step_files import read_file, verify_together
from titanlite.checkpoint.storage import StepReader, loading
from titanlite.config.batch_sizes import first_sample, samples_after
from titanlite.config.keys import ACCEPTABLE, schema_keys
from titanlite.config.schema import CheckpointConfig, PhaseConfig, TrainingConfig
from titanlite.data.excluded import Range, as_ranges
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.distributed.process_group import checkpoint_group
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.typed_json import Count, typed

logger = logging.getLogger("titanlite")

# File of a checkpoint: ranges of sample numbers (first, last + 1)
EXCLUDED = "excluded.json"


class SampleRange(NamedTuple):
    """An entry of excluded.json."""

    first: Count
    end: Count  # the last sample number + 1


class Resumed(NamedTuple):
    """The checkpoint from which a run continues."""

    step: int
    excluded: list[Range]  # sample numbers that the stream left out when it was saved


def resume(
    folder: Path,
    config: CheckpointConfig,
    facts: RunFacts,
    states: Mapping[str, Stateful],
    retention: Retention,
) -> Resumed:
    """Loads the newest usable checkpoint in a `checkpoints` folder into `states`, and renames later
    ones.

    All ranks call it together. Raises ConfigError if none is usable, or the config contradicts it.
    """
    started = time.monotonic()
    path, manifest = newest_usable(folder, config, retention)
    broadcast_from_rank0(
        lambda: require_compatible(path, manifest, facts.config, facts.files, config)
    )
    verified = time.monotonic()

    # DCP would call `load_state_dict({})` of a part that is switched off
    parts = switched_on(states)
    missing = missing_parts(manifest, parts)
    for name in missing:
        logger.info("%s: not in the checkpoint, so it starts anew", name)
        del parts[name]
    with loading(path):
        dcp.load(
            parts,
            storage_reader=StepReader(path, manifest),
            planner=PlacementLoadPlanner(),
            process_group=checkpoint_group(),
        )
    for part in missing.values():
        part.reset()  # after a rollback it has a state of this run
    excluded = as_ranges(broadcast_from_rank0(lambda: read_excluded(path, manifest)))

    loaded = time.monotonic()
    logger.info(
        f"resumed from {path} (saved by {manifest.degrees}): {manifest.size / 1e9:.3f} GB, "
        f"verified in {verified - started:.2f} s, loaded in {loaded - verified:.2f} s",
        extra={"event": "resume", "step": manifest.step},
    )
    changed = training_changes(manifest.config, facts.config)
    if changed:
        logger.info("changed since the checkpoint: %s", ", ".join(changed))
    set_aside_later(folder, manifest.step)
    broadcast_from_rank0(lambda: retention.go_back(manifest.step))
    return Resumed(manifest.step, excluded)


def missing_parts(manifest: Manifest, parts: Mapping[str, Stateful]) -> dict[str, OptionalStateful]:
    """Finds the optional parts that have a state now, but none in this older checkpoint."""
    saved = {name.partition(".")[0] for name in manifest.tensors}
    missing = {}
    for name, part in parts.items():
        if name not in saved and isinstance(part, OptionalStateful):
            missing[name] = part
    return missing


def read_excluded(folder: Path, manifest: Manifest) -> list[Range]:
    """Reads which samples were excluded when the checkpoint was saved. Raises CorruptCheckpoint."""
    if EXCLUDED not in manifest.files:
        return []
    try:
        ranges = typed(list[SampleRange], parse_json(read_file(folder, manifest, EXCLUDED)))
        if all(first < end for first, end in ranges):
            return as_ranges(ranges)
    except ConfigError:
        raise
    except ValueError:
        pass
    raise CorruptCheckpoint(
        f"{folder / EXCLUDED}: expected pairs of sample numbers; the checkpoint is damaged"
    )


def newest_usable(
    folder: Path, config: CheckpointConfig, retention: Retention
) -> tuple[Path, Manifest]:
    """Finds the newest checkpoint that is intact and finite, or that of `checkpoint.load_step`.

    If the run has no checkpoint, `load_step` is a step of the run in `checkpoint.initial_load`. All
    ranks call it together. Raises ConfigError if no checkpoint is usable.
    """
    load_step = config.load_step
    steps: list[int] = broadcast_from_rank0(lambda: list_steps(folder))
    if load_step and config.initial_load and not steps:
        return _of_another_run(Path(config.initial_load), load_step)
    candidates = steps
    if load_step:
        candidates = _candidates(folder, steps, load_step, retention)
    for step in reversed(candidates):
        path = step_folder(folder, step)
        # An unusable one is renamed, so that the next start does not verify it again
        manifest = _usable(path)
        if manifest:
            return path, manifest
    if load_step:
        others = ", ".join(str(step) for step in steps if step != load_step) or "none"
        raise ConfigError(
            f"checkpoint.load_step = {load_step}: it is damaged or not finite; "
            f"other steps: {others}"
        )
    renamed = broadcast_from_rank0(lambda: sorted(path.name for path in folder.glob("step-*.*")))
    raise ConfigError(
        f"{folder}: no checkpoint is complete and finite, and a new run cannot start in a folder "
        f"with {', '.join(renamed)}; choose another run.name, or move these folders away"
    )


def _candidates(folder: Path, steps: list[int], load_step: int, retention: Retention) -> list[int]:
    """Lists `checkpoint.load_step` and later steps saved with this setting; the last is preferred.

    So a repeated command with `load_step` resumes from its latest save. Raises ConfigError if there
    is none.
    """

    def saved_since() -> list[int]:
        with_this_setting = []
        for step in steps:
            if step <= load_step:
                continue
            manifest = retention.read(step)
            if manifest and manifest.config.get("checkpoint", {}).get("load_step") == load_step:
                with_this_setting.append(step)
        return with_this_setting

    later: list[int] = broadcast_from_rank0(saved_since)
    if later:
        logger.info(
            "checkpoint.load_step = %d: resuming from a step that was saved since", load_step
        )
    if load_step in steps:
        return [load_step, *later]
    if not later:  # with later steps, `load_step` itself may have been deleted since
        allowed = ", ".join(map(str, steps)) or "none, the run has no checkpoint"
        raise ConfigError(
            f"checkpoint.load_step = {load_step}: not in {folder}; allowed: {allowed}"
        )
    return later


def _of_another_run(run: Path, step: int) -> tuple[Path, Manifest]:
    """Finds a step of another run, whose folder is only read: a damaged step is an error, and is
    not renamed.
    """
    folder = run / "checkpoints"
    path = step_folder(folder, step)
    steps: list[int] = broadcast_from_rank0(lambda: list_steps(folder))
    if step not in steps:
        allowed = ", ".join(map(str, steps)) or "none, it has no checkpoint"
        raise ConfigError(
            f"checkpoint.load_step = {step}: not in {folder} (of initial_load); allowed: {allowed}"
        )
    manifest = verify_together(path)
    if not manifest.finite:
        raise ConfigError(f"{path}: contains NaN or infinity; choose another checkpoint.load_step")
    return path, manifest


def _usable(path: Path) -> Manifest | None:
    """Verifies a checkpoint and returns its manifest; if it is unusable, logs the reasons and
    renames the folder.
    """
    try:
        manifest = verify_together(path)
        if manifest.finite:
            return manifest
        kind = "nonfinite"
        problems = [f"{path}: contains NaN or infinity"]
    except CorruptCheckpoint as error:
        kind = "damaged"
        problems = error.problems
    if dist.get_rank() == 0:
        for problem in problems:
            logger.warning("%s: %s", kind, problem)
    renamed = broadcast_from_rank0(lambda: str(set_aside(path, kind)))
    logger.warning("%s: renamed to %s", path, renamed)
    return None


def set_aside_later(folder: Path, step: int) -> None:
    """Renames the checkpoints that are newer than the step from which the run continues.

    All ranks call it together.
    """

    def rename() -> list[tuple[int, str]]:
        renamed = []
        for later in list_steps(folder):
            if later > step:
                renamed.append((later, str(set_aside(step_folder(folder, later), "superseded"))))
        return renamed

    for later, aside in broadcast_from_rank0(rename):
        logger.info("step %d is newer than the resumed step: renamed to %s", later, aside)


def require_compatible(
    folder: Path,
    manifest: Manifest,
    config: Settings,
    files: Mapping[str, bytes],
    section: CheckpointConfig,
) -> None:
    """Raises ConfigError with every setting in which the checkpoint contradicts the current
    `config` and `files`.
    """
    try:
        saved_files = {
            name: read_file(folder, manifest, name) for name in ("model.json", "data.json")
        }
        samples = samples_used(folder, manifest)
        was = _compatibility_settings(manifest.config, saved_files, samples)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{folder}: {error!r}; the checkpoint is damaged") from None
    now = _compatibility_settings(config, files, samples)
    changed = []
    for key, value in now.items():
        # What the checkpoint does not have cannot contradict: a field that is newer than it
        if was.get(key, value) != value and key not in section.accepted:
            changed.append(key)
    if not changed:
        _require_counted_steps(config, manifest.step, samples, section.accepted)
        return

    problems = []
    for key in changed:
        if key == "data":
            differences = _source_differences(was[key], now[key])
            problems += [f"{folder}: {difference}" for difference in differences]
        else:
            problems.append(f"{folder}: {key} was {was.get(key)} and is {now[key]}")
    fixed = [key for key in changed if key not in ACCEPTABLE]
    if fixed:
        problems.append(
            f"{', '.join(fixed)}: cannot change within a run; start a new run (another run.name), "
            "with checkpoint.initial_load if its weights fit"
        )
    else:
        accepted = ",".join(sorted({*section.accepted, *changed}))
        problems.append(
            f"to resume with the new values: --checkpoint.accept={accepted}; "
            "else choose another run.name"
        )
    raise ConfigError(problems)


def samples_used(folder: Path, manifest: Manifest) -> int:
    """Reads the number of samples that the run had used at this checkpoint."""
    entry = manifest.tensors.get("data.samples")
    # A missing or different entry is reported when the state is loaded
    if entry is None or (entry.dtype, entry.shape) != ("I64", ()):
        return 0
    file = ShardFile(folder / entry.grid.files[0])
    return int(file.read("data.samples", entry.dtype, (), ()))


def _compatibility_settings(
    config: Settings, files: Mapping[str, bytes], samples: int
) -> dict[str, Any]:
    """Returns key -> value of the settings that must be the same.

    `samples`: the number of samples used at the checkpoint.
    """
    # A file may be older than a field; then runs did what the field's default does
    shape = {field.name: field.default for field in dataclasses.fields(LlamaConfig)}
    shape |= parse_json(files["model.json"])
    settings: dict[str, Any] = {f"model.{name}": value for name, value in shape.items()}
    for name, key in schema_keys().items():
        if key.resume == "any":
            continue
        section, _, entry = name.partition(".")
        # A checkpoint may be older than the key; then runs did what the key's default does
        settings[name] = _as_json(config.get(section, {}).get(entry, key.default))
    if settings["lora.rank"] > 0:  # another value could leave out adapters that the checkpoint has
        targets = settings["lora.targets"].replace(",", " ").split()
        settings["lora.targets"] = ", ".join(sorted(targets))
    else:
        del settings["lora.targets"]
        del settings["lora.layers"]
    settings["data.phases"] = _phases_begun(config, samples)  # later phases may change
    settings["data"] = _described_sources(parse_json(files["data.json"]))
    return settings


def _as_json(value: Any) -> Any:
    """Converts a value to what a manifest has: a tuple becomes a list."""
    return json.loads(json.dumps(value))


def _described_sources(data: dict[str, Any]) -> list[list[str]]:
    """Lists name and description of each source, from the content of data.json."""
    sources = data.get("sources") or [{"name": data["name"], "weight": 1, "manifest": data}]
    total = sum(source["weight"] for source in sources)
    described = []
    for source in sources:
        manifest = source["manifest"]
        text = f"{manifest['bytes']} bytes, fingerprint {manifest['fingerprint'][:8]}"
        if len(sources) > 1:
            text = f"{100 * source['weight'] / total:.6g}% of the samples, {text}"
        described.append([f"{source['name']:s}", text])  # `:s` refuses what is not a string
    return described


def _require_counted_steps(config: Settings, step: int, samples: int, accepted: list[str]) -> None:
    """Raises ConfigError if something begins at a step, and the steps so far had other batch sizes
    than the config.
    """
    sizes = _batch_sizes(config)
    keys = []
    if "data.phases" not in accepted:
        phases = config.get("data", {}).get("phases", ())
        if any(phase["from_step"] for phase in phases):
            keys.append("data.phases: from_step")
    if "from step" in " ".join(sizes.batch_ramp.split()):
        keys.append("training.batch_ramp: `from step`")
    if not keys:
        return
    expected = samples_after(sizes, 0, step)
    if samples != expected:
        ramp = " and of training.batch_ramp" if sizes.batch_ramp else ""
        raise ConfigError(
            f"{' and '.join(keys)} counts steps of training.global_batch_size = "
            f"{sizes.global_batch_size}{ramp}, which are {expected} samples until step {step}, but "
            f"the steps of the checkpoint have {samples} samples; expected from_tokens (in the "
            "ramp `from N tokens`), or the same batch sizes in the whole run"
        )


def _batch_sizes(config: Settings) -> TrainingConfig:
    """Reads the batch sizes in a checkpoint's config, which may be older than the ramp."""
    saved = config.get("training", {})
    names = ("global_batch_size", "batch_ramp", "seq_len")
    return TrainingConfig(**{name: saved[name] for name in names if name in saved})


def _source_differences(was: list[list[str]], now: list[list[str]]) -> list[str]:
    """Writes a line for each source that differs; a source is a name and a description."""
    if len(was) == len(now) == 1:
        name, text = was[0]
        new_name, new_text = now[0]
        data = "the data (its path, pattern or tokenizer, or the Python version)"
        return [f"{data} was {name} ({text}) and is {new_name} ({new_text})"]
    before = dict(was)
    after = dict(now)
    absent = "not among the sources"
    lines = []
    for name in before | after:
        old = before.get(name, absent)
        new = after.get(name, absent)
        if old != new:
            lines.append(f"data.sources: {name} was {old} and is {new}")
    if lines:
        return lines
    return [f"data.sources: their order was {', '.join(before)} and is {', '.join(after)}"]


def _phases_begun(config: Settings, samples: int) -> dict[str, Any]:
    """Maps first sample to weights, for the phases that begin before sample number `samples`."""
    begun = {}
    for entry in config.get("data", {}).get("phases", ()):
        first = first_sample(PhaseConfig(**entry), _batch_sizes(config))
        if first < samples:
            begun[f"from sample {first}"] = dict(entry["weights"])
    return begun


def training_changes(was: Settings, now: Settings) -> list[str]:
    """Lists changed settings that are allowed but change training, as `key old -> new`."""
    changes = []
    for section in ("training", "optimizer", "stability", "schedule", "float8", "ema"):
        for key, value in _as_json(now[section]).items():
            before = was.get(section, {}).get(key, value)
            if before != value:
                changes.append(f"{section}.{key} {before} -> {value}")
    return changes
