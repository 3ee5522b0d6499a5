"""Checkpoint manager: when a run saves, and from which checkpoint it resumes.

What it is: decides when to save and load. torch.distributed.checkpoint (DCP) does both: `dcp.save`
is called below and `dcp.load` in `resume.py`, with the run's Stateful objects, and with our planner
(`planner.py`) and storage (`storage.py`) as DCP's plug-ins. A run whose folder holds checkpoints
resumes from the newest complete one; a damaged one is reported, renamed and skipped. A save is due
every `freq` steps or `freq_minutes`, at the end, after a signal, and when a file named SAVE appears
in the run's folder.
A checkpoint is proven when a later step has a finite loss and gradient. Until then it may be
useless although all its numbers are finite: a huge update can leave weights whose next gradient is
NaN. So older checkpoints are deleted only once the newest is proven, and the newest plausible one
is never deleted (`retention.py`).
What it costs: the first step after a save, or a load, waits for the device, to read its gradient
norm and loss.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from titanlite.checkpoint import divergence
from titanlite.checkpoint.async_save import AsyncSaver
from titanlite.checkpoint.divergence import Suspect
from titanlite.checkpoint.folders import list_steps, step_folder, sweep
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.planner import PlacementSavePlanner
from titanlite.checkpoint.resume import EXCLUDED, resume
from titanlite.checkpoint.retention import Retention
from titanlite.checkpoint.run_facts import RunFacts
from titanlite.checkpoint.state import switched_on
from titanlite.checkpoint.storage import StepWriter, saving
from titanlite.config.schema import CheckpointConfig
from titanlite.data.excluded import Range
from titanlite.data.stream import TrainStream
from titanlite.distributed.agreement import PATIENT, broadcast_from_rank0, gather
from titanlite.distributed.process_group import checkpoint_group
from titanlite.observe.metrics_file import drop_later_lines
from titanlite.optim.stability import Guard, Outcome, Verdict
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")


class Diverged(RuntimeError):
    """Training has diverged, and the run ends. Its checkpoints are intact."""


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of the run, and what this process knows about it."""

    step: int = 0  # 0: there is no checkpoint
    proven: bool = True  # a later step of this process had a finite loss and gradient
    resumed: int = 0  # the step that this process has resumed from, until one is proven
    returned: bool = False  # whether a rollback has returned to `resumed`


class Checkpointer:
    """Saves and loads `states`, a name -> Stateful mapping, in `<run folder>/checkpoints`."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        states: dict[str, Stateful],
        facts: RunFacts,
        device: torch.device,
        guard: Guard,
    ) -> None:
        """`folder`: the run's folder; `guard`: the one in `states`, which a rollback resets."""
        self.config = config
        self.run_folder = folder
        self.folder = folder / "checkpoints"
        self.states = states
        self.facts = facts
        self.guard = guard
        self.planner = PlacementSavePlanner()
        self.saver = AsyncSaver(config.async_mode, config.retries, device)
        self.retention = Retention(self.folder)
        self.excluded: list[Range] = []  # sample numbers that later checkpoints record
        self.newest = Newest()
        self._saved_at = time.monotonic()

    def load(self) -> bool:
        """Resumes from the newest usable checkpoint of this run; returns False if it has none.

        Raises ConfigError if `checkpoint.load` forbids it, the config contradicts the checkpoint,
        or all are unusable.
        """
        mark_phase(Phase.LOAD)
        saved = broadcast_from_rank0(self._has_saved)
        self._exclude_rolled_back(divergence.excluded_before(self.run_folder))
        if saved or self.config.load_step:
            self._resume()
            return True
        weights = "new weights"
        if self.config.initial_load:
            weights = f"the weights of {self.config.initial_load}"
        logger.info("no checkpoint in %s: starting with %s", self.folder, weights)
        return False

    def _has_saved(self) -> bool:
        """Whether the run has checkpoints. Raises ConfigError if it must not."""
        if self.config.load == "never":
            for path in (self.folder, self.run_folder / "metrics.jsonl"):
                if path.exists():
                    raise ConfigError(
                        f"checkpoint.load = never, but {path} exists; choose another run.name or "
                        "delete the run's folder"
                    )
        sweep(self.folder)
        # A run whose checkpoints were all renamed must not begin again in the same folder either
        return bool(list_steps(self.folder)) or any(self.folder.glob("step-*.*"))

    def _resume(self) -> None:
        resumed = resume(self.folder, self.config, self.facts, self.states, self.retention)
        self.exclude_samples(resumed.excluded)
        # Not proven again yet: if this process diverges at once, this checkpoint is suspect
        self.newest = Newest(resumed.step, proven=False, resumed=resumed.step)

    def exclude_samples(self, ranges: list[Range]) -> None:
        """Makes the stream skip these samples too; checkpoints saved later record them."""
        if not ranges:
            return
        stream = self.states["data"]
        assert isinstance(stream, TrainStream)
        stream.exclude(ranges)
        self.excluded = list(stream.order.excluded)

    def _exclude_rolled_back(self, rollbacks: list[Range]) -> None:
        self.exclude_samples(rollbacks)
        self.guard.set_rollbacks(len(rollbacks))

    def files(self) -> dict[str, bytes]:
        """Returns the small files of a checkpoint: name -> content."""
        files = dict(self.facts.files)
        if self.excluded:
            files[EXCLUDED] = json.dumps(self.excluded).encode()
        return files

    def minutes_passed(self) -> bool:
        """Whether `freq_minutes` have passed since the last save, on the clock of rank 0."""
        seconds = 60 * self.config.freq_minutes
        passed = 0 < seconds <= time.monotonic() - self._saved_at
        return passed and dist.get_rank() == 0

    @property
    def unproven(self) -> bool:
        """Whether this process has not yet proven the newest checkpoint."""
        return not self.newest.proven

    def due(self, step: int, requested: bool) -> bool:
        """Whether to save after this step. `requested`: it is the last step, or all ranks have
        agreed to a request.
        """
        if step == self.newest.step:
            return False
        regular = self.config.freq > 0 and step % self.config.freq == 0
        return requested or regular

    def save(self, step: int, validation_loss: float | None, wait: bool) -> None:
        """Saves the state after this step. All ranks call it together. Raises SaveError.

        Returns when the save is complete if `wait`, or if saving is not asynchronous.
        """
        mark_phase(Phase.SAVE)
        self.newest = replace(self.newest, step=step, proven=False)
        self._saved_at = time.monotonic()
        if validation_loss is not None and not math.isfinite(validation_loss):
            validation_loss = None
        metadata = self.facts.metadata(validation_loss)
        write = functools.partial(self._write, step, self.files(), metadata, time.monotonic())
        self.saver.save(switched_on(self.states), write)
        if wait:
            self.close()

    def _write(
        self,
        step: int,
        files: dict[str, bytes],
        metadata: RunMetadata,
        started: float,
        state: Mapping[str, Any],
        failure: Exception | None,
    ) -> None:
        """Writes and logs a checkpoint: in the saver's thread if saving is asynchronous.

        `state`: the Stateful objects, or if they were staged, copies of their state.
        """
        writer = StepWriter(self.folder, step, self.planner, files, metadata, failure)
        try:
            with saving(step, self.folder):
                dcp.save(
                    dict(state),
                    storage_writer=writer,
                    planner=self.planner,
                    process_group=checkpoint_group(),
                )
        finally:
            self.planner.release()  # otherwise a copy of the state would live until the next save
        manifest = writer.manifest
        if manifest is None:  # not on rank 0
            return
        seconds = time.monotonic() - started
        size = manifest.size / 1e9
        waited = self.saver.waited if self.saver.background else seconds
        logger.info(
            f"saved {step_folder(self.folder, step)}: {size:.3f} GB in {seconds:.2f} s, "
            f"{size / seconds:.2f} GB/s, training waited {waited:.3f} s",
            extra={"event": "save", "step": step},
        )
        if not manifest.finite:
            logger.warning(
                "step %d contains NaN or infinity: the run will not resume from it", step
            )
        self.retention.add(manifest)

    def prove(self, loss: float) -> None:
        """Marks the newest checkpoint as proven, after a later step with finite loss and gradient.

        Rank 0 then deletes older ones. `loss`: that of the later step, over all ranks.
        """
        if self.newest.proven:
            return
        mark_phase(Phase.DELETE_CHECKPOINTS)
        self.newest = Newest(self.newest.step)
        if dist.get_rank() == 0:
            uniform_loss = math.log(self.facts.vocab_size)
            prove = functools.partial(
                self.retention.prove, self.newest.step, loss, uniform_loss, self.config
            )
            self.saver.after_save(prove)

    def roll_back(self, outcome: Outcome) -> None:
        """Returns to the newest checkpoint after a bad step, and excludes the samples of that step.

        All ranks call it together. Raises Diverged unless `stability.action` and `max_rollbacks`
        permit it.
        """
        self.close()  # a save in progress may be the checkpoint to return to
        verdict = outcome.acts_on
        problem = outcome.description
        stability = self.guard.config
        if verdict is not None and stability.action == "rollback":
            # The first bad step after a resume may be due to its samples: only a second one, with
            # other samples, makes the checkpoint suspect
            step = self.newest.resumed if self.newest.returned else 0
            suspect = Suspect(step, self.config.load_step > 0)
            rollback = divergence.begin_rollback(
                self.run_folder, verdict, stability.max_rollbacks, suspect
            )
            if not rollback.problem:
                self._return(verdict, rollback.excluded)
                return
            problem = f"{problem}; {rollback.problem}"
        elif verdict is not None and stability.action == "skip":
            in_a_row = f"{verdict.num_not_finite} steps in a row were not finite"
            problem = f"{problem}; {in_a_row} (stability.max_skips)"
        diverged = {"event": "diverged", "step": outcome.step}
        logger.info("%s: training has diverged", problem, extra=diverged)
        suspect = Suspect(self.newest.resumed, self.config.load_step > 0)
        advice = broadcast_from_rank0(lambda: divergence.step_back(self.run_folder, suspect))
        raise Diverged(f"{problem}: training has diverged; {advice}")

    def _return(self, verdict: Verdict, rollbacks: list[Range]) -> None:
        """Loads the newest checkpoint, and excludes the samples of all `rollbacks`."""
        self.guard.reset()
        self._exclude_rolled_back(rollbacks)
        self._resume()
        self.newest = replace(self.newest, returned=True)
        broadcast_from_rank0(lambda: drop_later_lines(self.run_folder, self.newest.step))
        count = f"rollback {len(rollbacks)} of {self.guard.config.max_rollbacks}"
        logger.info(
            f"{verdict}; rolled back to step {self.newest.step}, and these samples are excluded "
            f"in this epoch ({count})",
            extra={"event": "rollback", "step": verdict.step},
        )

    def close(self) -> None:
        """Waits for the save in progress, on all ranks.

        Raises SaveError, or the process group's error.
        """
        self.saver.wait_for_staging()
        mark_phase(Phase.SAVE)
        self.saver.wait()
        # Rank 0 may still be deleting; a rank that exited before it would end the run
        gather(None, PATIENT)
