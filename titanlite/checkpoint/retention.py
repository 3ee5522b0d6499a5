"""Which checkpoints stay.

What it is: one rule, for the run itself and for `titanlite checkpoint prune`. The newest `keep`, every `keep_every`-th
step for good, and the `keep_best` with the lowest validation loss stay; so the newest always does.
Only whole and finite checkpoints are counted, and only such are deleted: what is damaged, set aside or holds NaN
neither pushes out a good one nor goes unseen.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from titanlite.checkpoint.manifest import Manifest, file_problems, read_manifest
from titanlite.checkpoint.storage import list_steps, step_folder
from titanlite.config.schema import ConfigError


class ManifestCache:
    """Manifests of a `checkpoints` folder, without their tensors, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[int, Manifest] = {}

    def add(self, manifest: Manifest) -> None:
        """A checkpoint just written, perhaps of a step that there was before."""
        self._read[manifest.step] = dataclasses.replace(manifest, tensors={})

    def read(self, step: int) -> Manifest | None:
        """The manifest of a step; None where it cannot be read."""
        if step not in self._read:
            try:
                self.add(read_manifest(step_folder(self.folder, step)))
            except ConfigError:  # damaged, or of another titanlite
                return None
        return self._read.get(step)

    def good(self) -> list[Manifest]:
        """Of the checkpoints that are finite and whose files are all there in their sizes, by step."""
        found = (self.read(step) for step in list_steps(self.folder))
        return [m for m in found if m and m.finite and not file_problems(step_folder(self.folder, m.step), m)]


def steps_to_delete(good: list[Manifest], keep: int, keep_every: int, keep_best: int) -> list[int]:
    """Steps that the rule lets go; `good` is ascending. keep = 0 keeps all."""
    steps = [manifest.step for manifest in good]
    if not keep:
        return []
    judged = sorted((m.validation_loss, -m.step) for m in good if m.validation_loss is not None)
    kept = {*steps[-keep:], *(-step for _, step in judged[:keep_best])}
    kept |= {step for step in steps if keep_every and step % keep_every == 0}
    return [step for step in steps if step not in kept]
