"""Retention: which checkpoints are kept.

What it is: one rule, for the run itself and for `titanlite checkpoint prune`. It keeps the newest
`keep` checkpoints, every `keep_every`-th step, and the `keep_best` with the lowest validation loss;
so it always keeps the newest.
Only complete and finite checkpoints count, and only these are deleted: a damaged checkpoint, or one
that contains NaN, never displaces a good one and is never deleted unnoticed. The run applies the
rule when the newest one is proven (see `manager.py`); `prune` also keeps the newest proven one.
Why a finite loss is not enough: RMSNorm makes a finite loss of weights of any size, so weights that
one bad step has made useless can be saved, and can train on. A checkpoint is plausible if its loss
is at most MARGIN above the lowest of the plausible ones before it, and the first one at most MARGIN
above ln V, the loss of equal probabilities for V tokens. The newest plausible one is kept in
addition to the rule.
What it costs: each manifest is read once; file sizes are looked up after each save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlite.checkpoint.folders import list_steps, remove_folder, step_folder
from titanlite.checkpoint.manifest import Manifest, read_manifest
from titanlite.checkpoint.step_files import file_problems
from titanlite.config.schema import CheckpointConfig
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file, sync_folder
from titanlite.runtime.typed_json import Count, typed

logger = logging.getLogger("titanlite")

PROVEN = ".proven"  # in the run's folder: a `Proof` as JSON
MARGIN = 1.0  # nats; one nat more is a perplexity e times as high


@dataclass(frozen=True)
class Proof:
    """What a run knows about the quality of its checkpoints: the content of `.proven`."""

    step: Count = 0  # newest step after which another had a finite gradient; 0: none
    # The newest proven step whose loss was not far above those before; 0: none
    plausible: Count = 0
    loss: float | None = None  # the lowest training loss of the step after a plausible one
    validation_loss: float | None = None  # the lowest validation loss of a plausible one


def read_proof(run_folder: Path) -> Proof:
    """Reads the record in a run's folder; an empty one if there is none or it is damaged."""
    try:
        proof = typed(Proof, read_json(run_folder / PROVEN, 1000))
        losses = (proof.loss, proof.validation_loss)
        if all(loss is None or math.isfinite(loss) for loss in losses):
            return proof
    except (OSError, ValueError):
        pass
    return Proof()


def delete_step(folder: Path, step: int) -> None:
    """Removes a checkpoint. It is renamed first, so that a partly deleted one is never read."""
    renamed = step_folder(folder, step).rename(folder / f"step-{step}.deleted")
    # Without this, a power failure could undo the rename but not the removal of files
    sync_folder(folder)
    remove_folder(renamed)


class Retention:
    """Applies the rule to a `checkpoints` folder; reads each manifest once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[int, Manifest] = {}

    def add(self, manifest: Manifest) -> None:
        """Adds a checkpoint just written, which may replace an earlier one of the same step."""
        self._read[manifest.step] = dataclasses.replace(manifest, tensors={})

    def read(self, step: int) -> Manifest | None:
        """Returns the manifest of a step; None if it cannot be read."""
        if step not in self._read:
            try:
                self.add(read_manifest(step_folder(self.folder, step)))
            except ConfigError:  # damaged, or of another format version
                return None
        return self._read.get(step)

    def good(self) -> list[Manifest]:
        """Lists the finite checkpoints whose files all have the right size, ascending."""
        good = []
        for step in list_steps(self.folder):
            manifest = self.read(step)
            if manifest is None or not manifest.finite:
                continue
            if not file_problems(step_folder(self.folder, step), manifest.files):
                good.append(manifest)
        return good

    def go_back(self, step: int) -> None:
        """Forgets what is known about steps after the one from which the run continues."""
        proof = read_proof(self.folder.parent)
        # Later checkpoints are compared with the one that the user went back to
        if proof.plausible > step:
            proof = Proof(step, step)
        self.write(dataclasses.replace(proof, step=min(step, proof.step)))

    def write(self, proof: Proof) -> None:
        with contextlib.suppress(OSError):  # without the record, a checkpoint counts as unproven
            replace_file(self.folder.parent / PROVEN, json.dumps(asdict(proof)).encode())

    def prove(self, step: int, loss: float, uniform_loss: float, config: CheckpointConfig) -> None:
        """Records that the newest checkpoint is proven, and deletes what the rule does not keep.

        `loss`: the training loss of the step after it; if the checkpoint has a validation loss,
        that counts instead. `uniform_loss`: ln V.
        """
        manifest = self.read(step)
        validation_loss = manifest.validation_loss if manifest else None
        proof = judge(read_proof(self.folder.parent), step, loss, validation_loss, uniform_loss)
        self.write(proof)
        if not config.keep:
            return
        try:
            rule = (config.keep, config.keep_every, config.keep_best, proof.plausible)
            for old in steps_to_delete(self.good(), *rule):
                delete_step(self.folder, old)
        except (OSError, ConfigError) as error:
            # Not an error: the new checkpoint is complete, and the old one only takes space
            logger.warning("an old checkpoint in %s could not be deleted: %s", self.folder, error)


def judge(
    before: Proof, step: int, loss: float, validation_loss: float | None, uniform_loss: float
) -> Proof:
    """Returns the record after `step` is proven; `before`: the record until then.

    Warns if its loss is far above the others.
    """
    # Compare validation losses only if the one before is known too
    judged = loss
    reference = uniform_loss if before.loss is None else before.loss
    name = "the training loss after it"
    if validation_loss is not None and before.validation_loss is not None:
        judged = validation_loss
        reference = before.validation_loss
        name = "its validation loss"

    if step == before.plausible:
        # A process that resumes from it does not judge it again: the data may have changed
        return Proof(step, step, loss, validation_loss)
    if judged <= reference + MARGIN:
        lowest = _lower(before.loss, loss)
        lowest_validation = _lower(before.validation_loss, validation_loss)
        return Proof(step, step, lowest, lowest_validation)
    # Warn once: later checkpoints are implausible too until the loss has come down
    if before.step == before.plausible:
        consequence = "None is better"
        if before.plausible:
            consequence = f"Step {before.plausible} is kept until a newer one is plausible"
        text = "the checkpoint of step %d may be useless: %s is %.4g; expected at most %.4g. %s"
        logger.warning(text, step, name, judged, reference + MARGIN, consequence)
    return dataclasses.replace(before, step=step)


def _lower(first: float | None, second: float | None) -> float | None:
    """Returns the lower of the losses that are known."""
    known = [loss for loss in (first, second) if loss is not None]
    return min(known, default=None)


def steps_to_delete(
    good: list[Manifest], keep: int, keep_every: int, keep_best: int, plausible: int = 0
) -> list[int]:
    """Lists the steps that the rule does not keep; `good` is ascending.

    keep = 0 keeps all; `plausible`: a step to keep in any case.
    """
    if not keep:
        return []
    steps = [manifest.step for manifest in good]
    validated = []  # best first; among equals, the newer first
    for manifest in good:
        if manifest.validation_loss is not None:
            validated.append((manifest.validation_loss, -manifest.step))
    validated.sort()

    to_keep = {plausible, *steps[-keep:]}
    to_keep.update(-negative_step for _, negative_step in validated[:keep_best])
    if keep_every:
        to_keep.update(step for step in steps if step % keep_every == 0)
    return [step for step in steps if step not in to_keep]


def set_aside(path: Path, reason: str) -> Path:
    """Renames a step folder to `step-N.<reason>`: it no longer counts as a step, and its files are
    kept.
    """
    for count in range(1, 1000):
        suffix = f"-{count}" if count > 1 else ""
        aside = path.with_name(f"{path.name}.{reason}{suffix}")
        if not aside.exists():
            return path.rename(aside)
    raise ConfigError(f"{path}: 999 folders are named {path.name}.{reason}; remove some")
