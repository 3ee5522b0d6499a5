"""Retention: which checkpoints are kept.

What it is: one rule, for the run itself and for `titanlite checkpoint prune`. It keeps the newest `keep` checkpoints,
every `keep_every`-th step, and the `keep_best` with the lowest validation loss; so it always keeps the newest.
Only complete and finite checkpoints count, and only these are deleted: a damaged checkpoint, or one that contains NaN,
never displaces a good one and is never deleted unnoticed. The run applies the rule when the newest one is proven (see
`manager.py`); `prune` also keeps the newest proven one.
What it costs: each manifest is read once; file sizes are looked up after each save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path

from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.storage import list_steps, remove_folder, step_folder
from titanlite.config.files import read_bounded, replace_file, sync_folder
from titanlite.config.schema import CheckpointConfig, ConfigError

logger = logging.getLogger("titanlite")

PROVEN = ".proven"  # in the run's folder: the newest step whose checkpoint has given a finite loss or gradient


def proven_step(run_folder: Path) -> int:
    """The newest proven step; 0 if none is known."""
    try:
        return max(0, int(read_bounded(run_folder / PROVEN, 18)))
    except (OSError, ValueError):
        return 0


def delete_step(folder: Path, step: int) -> None:
    """Removes a checkpoint. It is renamed first, so that a partly deleted one is never read."""
    renamed = step_folder(folder, step).rename(folder / f"step-{step}.deleted")
    sync_folder(folder)  # otherwise a power failure could undo the rename, but not the removal of files
    remove_folder(renamed)


class Retention:
    """Manifests of a `checkpoints` folder, without their tensors, each read once; applies the rule to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[int, Manifest] = {}

    def add(self, manifest: Manifest) -> None:
        """Adds a checkpoint just written, which may replace an earlier one of the same step."""
        self._read[manifest.step] = dataclasses.replace(manifest, tensors={})

    def read(self, step: int) -> Manifest | None:
        """The manifest of a step; None if it cannot be read."""
        from titanlite.checkpoint.manifest_reader import read_manifest  # imported only if there is something to read

        if step not in self._read:
            try:
                self.add(read_manifest(step_folder(self.folder, step)))
            except ConfigError:  # damaged, or of another format version
                return None
        return self._read.get(step)

    def good(self) -> list[Manifest]:
        """The checkpoints that are finite and have all files in their sizes, ascending."""
        from titanlite.checkpoint.manifest_reader import file_problems

        found = (self.read(step) for step in list_steps(self.folder))
        return [m for m in found if m and m.finite and not file_problems(step_folder(self.folder, m.step), m.files)]

    def lower_proven(self, step: int) -> int:
        """Lowers the mark to `step`, from which the run continues, and returns it: later steps were abandoned."""
        proven = min(step, proven_step(self.folder.parent))
        self._mark(proven)
        return proven

    def _mark(self, step: int) -> None:
        with contextlib.suppress(OSError):  # without the mark, a checkpoint counts as unproven
            replace_file(self.folder.parent / PROVEN, str(step).encode())

    def prove(self, step: int, config: CheckpointConfig) -> None:
        """Marks the newest checkpoint as proven, and deletes what the rule does not keep."""
        self._mark(step)
        rule = config.keep, config.keep_every, config.keep_best
        try:
            for old in steps_to_delete(self.good(), *rule) if config.keep else []:
                delete_step(self.folder, old)
        except (OSError, ConfigError) as error:  # the new checkpoint is complete; the old one only takes space
            logger.warning("an old checkpoint in %s could not be deleted: %s", self.folder, error)


def steps_to_delete(good: list[Manifest], keep: int, keep_every: int, keep_best: int) -> list[int]:
    """The steps that the rule does not keep; `good` is ascending. keep = 0 keeps all."""
    steps = [manifest.step for manifest in good]
    if not keep:
        return []
    judged = sorted((m.validation_loss, -m.step) for m in good if m.validation_loss is not None)
    kept = {*steps[-keep:], *(-step for _, step in judged[:keep_best])}
    kept |= {step for step in steps if keep_every and step % keep_every == 0}
    return [step for step in steps if step not in kept]


def set_aside(path: Path, why: str) -> Path:
    """Renames a step folder to `step-N.<why>`: it no longer counts as a step, and its files are kept."""
    for count in range(1, 1000):
        aside = path.with_name(f"{path.name}.{why}" + (f"-{count}" if count > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
    raise ConfigError(f"{path}: 999 folders are named {path.name}.{why}; remove some")
