"""Resuming: from which checkpoint a run continues, and which settings it must share with it.

What it is: the newest checkpoint that is complete, intact and finite; others are renamed on the way
to it. The model's shape must be the same, because its tensors would not fit. Data, seed, sequence
length and optimizer settings must be the same because the losses would differ; a change of these
can be accepted by name, and later checkpoints then contain the new values. Everything else may
change: layout, number of processes, precision, schedule, number of steps, how often to save. The
samples that the run had excluded (`divergence.py`) are in the checkpoint's excluded.json, because
its position in the data counts the others; so a copy of it, or a branch from it, reads the same
samples next.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest
from titanlite.checkpoint.manifest_reader import read_file
from titanlite.checkpoint.read_step import load_states, read_step, verify_together
from titanlite.checkpoint.retention import Retention, set_aside
from titanlite.checkpoint.storage import list_steps, step_folder
from titanlite.checkpoint.write_plan import State
from titanlite.config.acceptable import ACCEPTABLE
from titanlite.config.batch_sizes import first_sample, samples_after
from titanlite.config.schema import CheckpointConfig, PhaseConfig, TrainingConfig, sections
from titanlite.data.excluded import Range
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")

# In a checkpoint: pairs of a first sample number and the one after the last
EXCLUDED = "excluded.json"


def resume(run: Any) -> None:
    """Replaces the state of a run (a `Checkpointer`) by that of its newest usable checkpoint, and
    renames later ones.

    All ranks call it together. Raises ConfigError if none is usable, or the config contradicts it.
    """
    started = time.monotonic()
    config = run.facts.config
    path, manifest = newest_usable(run.folder, run.config, run.retention)
    broadcast_from_rank0(
        lambda: require_compatible(path, manifest, config, run.extra_files, run.config)
    )
    verified = time.monotonic()
    state = saved_parts(
        manifest, run.states, {name: part.state_dict() for name, part in run.states.items()}
    )
    read_step(path, manifest, state)
    load_states(path, run.states, state)
    for part in [part for name, part in run.states.items() if name not in state]:
        part.reset()  # in a rollback it is no longer as at the start
    exclude_samples(run, broadcast_from_rank0(lambda: read_excluded(path, manifest)))
    logger.info(
        f"resumed from {path} (saved by {manifest.degrees}): {manifest.size / 1e9:.3f} GB, "
        f"verified in {verified - started:.2f} s, loaded in {time.monotonic() - verified:.2f} s",
        extra={"event": "resume", "step": manifest.step},
    )
    changed = training_changes(manifest.config, config)
    if changed:
        logger.info("changed since the checkpoint: %s", ", ".join(changed))
    set_aside_later(run.folder, manifest.step)
    broadcast_from_rank0(lambda: run.retention.go_back(manifest.step))
    run.newest = run.resumed = manifest.step
    # Also if it was proven: if this process diverges at once, something is wrong with it
    run.unproven = True


def exclude_samples(run: Any, ranges: list[Range]) -> None:
    """Excludes these samples too, in this process and in the checkpoints that the run (a
    `Checkpointer`) saves.
    """
    if ranges:
        stream = run.states["data"]
        stream.exclude([(first, end) for first, end in ranges])
        run.extra_files[EXCLUDED] = json.dumps(stream.order.excluded).encode()


def read_excluded(folder: Path, manifest: Manifest) -> list[Range]:
    """The samples that were excluded when the checkpoint was saved. Raises CorruptCheckpoint."""
    if EXCLUDED not in manifest.files:
        return []
    try:
        ranges = [(first, end) for first, end in json.loads(read_file(folder, manifest, EXCLUDED))]
        if all(
            type(first) is type(end) is int and 0 <= first < end < 1 << 62 for first, end in ranges
        ):
            return ranges
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
    raise CorruptCheckpoint(
        f"{folder / EXCLUDED}: expected pairs of sample numbers; the checkpoint is damaged"
    )


def newest_usable(
    folder: Path, config: CheckpointConfig, retention: Retention
) -> tuple[Path, Manifest]:
    """The newest checkpoint that is intact and finite, or that of `checkpoint.load_step`. All ranks
    call it together.

    In a run that has none, `load_step` is a step of the run in `checkpoint.initial_load`. Raises
    ConfigError if no checkpoint is usable.
    """
    steps: list[int] = broadcast_from_rank0(lambda: list_steps(folder))
    if config.load_step and config.initial_load and not steps:
        return _of_another_run(Path(config.initial_load), config.load_step)
    for step in reversed(
        _candidates(folder, steps, config.load_step, retention) if config.load_step else steps
    ):
        path = step_folder(folder, step)
        manifest = _usable(path)
        if manifest:
            return path, manifest
    back_to = config.load_step
    if back_to:
        left = ", ".join(str(step) for step in steps if step != back_to) or "none"
        raise ConfigError(
            f"checkpoint.load_step = {back_to}: it is damaged or not finite; other steps: {left}"
        )
    found = broadcast_from_rank0(lambda: sorted(path.name for path in folder.glob("step-*.*")))
    raise ConfigError(
        f"{folder}: no checkpoint is complete and finite, and a new run cannot start in a folder with "
        f"{', '.join(found)}; choose another run.name, or move these folders away"
    )


def _candidates(folder: Path, steps: list[int], back_to: int, retention: Retention) -> list[int]:
    """`checkpoint.load_step` and the steps saved later with this setting, the preferred one last.

    So a command with `load_step`, if repeated, resumes from its latest save. Raises ConfigError if
    there is none.
    """

    def saved_since(step: int) -> bool:
        manifest = retention.read(step)
        return (
            manifest is not None
            and manifest.config.get("checkpoint", {}).get("load_step") == back_to
        )

    later: list[int] = broadcast_from_rank0(
        lambda: [step for step in steps if step > back_to and saved_since(step)]
    )
    if back_to not in steps and not later:  # the step itself may have been deleted since
        allowed = ", ".join(map(str, steps)) or "none, the run has no checkpoint"
        raise ConfigError(f"checkpoint.load_step = {back_to}: not in {folder}; allowed: {allowed}")
    if later:
        logger.info("checkpoint.load_step = %d: resuming from a step that was saved since", back_to)
    return [back_to, *later] if back_to in steps else later


def _of_another_run(run: Path, step: int) -> tuple[Path, Manifest]:
    """A step of the run in folder `run`, which is only read: a damaged step is an error, and is not
    renamed.
    """
    folder = run / "checkpoints"
    step_path = step_folder(run / "checkpoints", step)
    steps: list[int] = broadcast_from_rank0(lambda: list_steps(folder))
    if step not in steps:
        allowed = ", ".join(map(str, steps)) or "none, it has no checkpoint"
        raise ConfigError(
            f"checkpoint.load_step = {step}: not in {folder} (of initial_load); allowed: {allowed}"
        )
    manifest = verify_together(step_path)
    if not manifest.finite:
        raise ConfigError(
            f"{step_path}: contains NaN or infinity; choose another checkpoint.load_step"
        )
    return step_path, manifest


def _usable(path: Path) -> Manifest | None:
    """The manifest of a checkpoint, after verification; if it is unusable, logs the reasons and
    renames the folder.
    """
    try:
        manifest = verify_together(path)
        problems = [] if manifest.finite else [f"{path}: contains NaN or infinity"]
        why = "nonfinite"
    except CorruptCheckpoint as error:
        problems = error.problems
        why = "damaged"
    if not problems:
        return manifest
    for problem in problems if dist.get_rank() == 0 else ():
        logger.warning("%s: %s", why, problem)
    logger.warning(
        "%s: renamed to %s", path, broadcast_from_rank0(lambda: str(set_aside(path, why)))
    )
    return None


def set_aside_later(folder: Path, step: int) -> None:
    """Renames the checkpoints that are newer than the step from which the run continues.

    All ranks call it together.
    """

    def rename() -> list[list[Any]]:
        later = [other for other in list_steps(folder) if other > step]
        return [
            [other, str(set_aside(step_folder(folder, other), "superseded"))] for other in later
        ]

    for other, aside in broadcast_from_rank0(rename):
        logger.info("step %d is newer than the resumed step: renamed to %s", other, aside)


def saved_parts(manifest: Manifest, states: dict[str, Any], state: State) -> State:
    """`state` without the optional parts that a checkpoint does not have, because it is older than
    what needs them.

    A part of `states` is optional if it has the attribute `optional` and that is true; it also has
    a method `reset`.
    """
    saved = {name.partition(".")[0] for name in manifest.tensors}
    missing = []
    for name, values in state.items():
        # A part that is switched off has no values
        if values and name not in saved and getattr(states[name], "optional", False):
            missing.append(name)
    for name in missing:
        logger.info("%s: not in the checkpoint, so it starts anew", name)
    return {name: values for name, values in state.items() if name not in missing}


def require_compatible(
    folder: Path,
    manifest: Manifest,
    config: dict[str, dict[str, Any]],
    files: dict[str, bytes],
    section: CheckpointConfig,
) -> None:
    """Raises ConfigError with every setting in which the checkpoint contradicts the current
    `config` and `files`.
    """
    try:
        saved = {name: read_file(folder, manifest, name) for name in ("model.json", "data.json")}
        samples = torch.zeros((), dtype=torch.int64)
        # If not, the state that is missing is reported when it is loaded
        if "data.samples" in manifest.tensors:
            read_step(folder, manifest, {"data": {"samples": samples}}, alone=True)
        was = _compatibility_settings(manifest.config, saved, int(samples))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(f"{folder}: {error!r}; the checkpoint is damaged") from None
    now = _compatibility_settings(config, files, int(samples))
    changed = [
        key for key in now if was.get(key, now[key]) != now[key] and key not in section.accepted
    ]
    if not changed:
        _require_counted_steps(config, manifest.step, int(samples), section.accepted)
        return
    problems = []
    for key in changed:
        if key == "data":
            problems += [
                f"{folder}: {difference}" for difference in _source_differences(was[key], now[key])
            ]
        else:
            problems.append(f"{folder}: {key} was {was.get(key)} and is {now[key]}")
    fixed = [key for key in changed if key not in ACCEPTABLE]
    if fixed:
        what = "start a new run (another run.name), with checkpoint.initial_load if its weights fit"
        problems.append(f"{', '.join(fixed)}: cannot change within a run; {what}")
    else:
        accepted = ",".join(sorted({*section.accepted, *changed}))
        problems.append(
            f"to resume with the new values: --checkpoint.accept={accepted}; else choose another run.name"
        )
    raise ConfigError(problems)


def _compatibility_settings(
    config: dict[str, dict[str, Any]], files: dict[str, bytes], samples: int
) -> dict[str, Any]:
    """Key -> value of the settings that must be the same.

    `samples`: how many the checkpoint has used.
    """
    settings = {f"model.{name}": value for name, value in json.loads(files["model.json"]).items()}
    for key in (*ACCEPTABLE, "optimizer.name"):
        section, _, name = key.partition(".")
        # a checkpoint may be older than the key
        if key != "data.phases" and name in config.get(section, {}):
            # a tuple is a list in a manifest
            settings[key] = json.loads(json.dumps(config[section][name]))
        elif name:  # the default is what runs did before there was the key
            settings[key] = json.loads(json.dumps(getattr(sections()[section](), name)))
    settings["data.phases"] = _phases_begun(config, samples)  # later ones may change
    data = json.loads(files["data.json"])
    sources = data.get("sources") or [{"name": data["name"], "weight": 1, "manifest": data}]
    total = sum(source["weight"] for source in sources)
    settings["data"] = []
    for source in sources:
        share = (
            f"{100 * source['weight'] / total:.6g}% of the samples, " if len(sources) > 1 else ""
        )
        content = f"{source['manifest']['bytes']} bytes, fingerprint {source['manifest']['fingerprint'][:8]}"
        # `:s` refuses what is not a string
        settings["data"].append([f"{source['name']:s}", share + content])
    return settings


def _require_counted_steps(
    config: dict[str, dict[str, Any]], step: int, samples: int, accepted: list[str]
) -> None:
    """Raises ConfigError if something begins at a step, and the steps so far had other batch sizes
    than the config.
    """
    sizes = _batch_sizes(config)
    phases = config.get("data", {}).get("phases", ()) if "data.phases" not in accepted else ()
    keys = ["data.phases: from_step"] * any(phase["from_step"] for phase in phases)
    keys += ["training.batch_ramp: `from step`"] * (
        "from step" in " ".join(sizes.batch_ramp.split())
    )
    if keys and samples != (expected := samples_after(sizes, 0, step)):
        ramp = " and of training.batch_ramp" if sizes.batch_ramp else ""
        raise ConfigError(
            f"{' and '.join(keys)} counts steps of training.global_batch_size = {sizes.global_batch_size}{ramp}, which "
            f"are {expected} samples until step {step}, but the steps of the checkpoint have {samples} samples; "
            "expected from_tokens (in the ramp `from N tokens`), or the same batch sizes in the whole run"
        )


def _batch_sizes(config: dict[str, dict[str, Any]]) -> TrainingConfig:
    """The batch sizes in the config of a checkpoint, which may be older than the ramp."""
    saved = config.get("training", {})
    names = ("global_batch_size", "batch_ramp", "seq_len")
    return TrainingConfig(**{name: saved[name] for name in names if name in saved})


def _source_differences(was: list[list[str]], now: list[list[str]]) -> list[str]:
    """A line for each source that is not the same."""
    before = dict(was)
    after = dict(now)
    if len(was) == len(now) == 1:
        (name, text), (other, other_text) = was[0], now[0]
        what = "the data (its path, pattern or tokenizer, or the Python version)"
        return [f"{what} was {name} ({text}) and is {other} ({other_text})"]
    absent = "not among the sources"
    names = [name for name in before | after if before.get(name) != after.get(name)]
    lines = [
        f"data.sources: {name} was {before.get(name, absent)} and is {after.get(name, absent)}"
        for name in names
    ]
    return lines or [f"data.sources: their order was {', '.join(before)} and is {', '.join(after)}"]


def _phases_begun(config: dict[str, dict[str, Any]], samples: int) -> dict[str, Any]:
    """First sample -> weights of the phases before sample number `samples`; later ones may still be
    changed.
    """
    begun = {}
    for entry in config.get("data", {}).get("phases", ()):
        first = first_sample(PhaseConfig(**entry), _batch_sizes(config))
        if first < samples:
            begun[f"from sample {first}"] = dict(entry["weights"])
    return begun


def training_changes(was: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Settings that may change, but change how the run trains: one `key old -> new` each."""
    found = []
    for section in ("training", "optimizer", "stability", "schedule", "float8", "ema"):
        for key, value in json.loads(json.dumps(now[section])).items():
            before = was.get(section, {}).get(key, value)
            if before != value:
                found.append(f"{section}.{key} {before} -> {value}")
    return found
