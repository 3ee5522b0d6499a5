"""Checkpoint manager: when a run saves, and from which checkpoint it resumes.

What it is: decides when to save and load; `storage.py` writes and `read_step.py` reads. A run whose
folder holds checkpoints resumes from the newest complete one; a damaged one is reported, renamed
and skipped. A save is due every `freq` steps or `freq_minutes`, at the end, after a signal, and
when a file named SAVE appears in the run's folder.
A checkpoint is proven when the gradient norm of a later step is finite. A bad step can leave finite
weights whose next gradient is NaN, also where their validation loss is finite, so older checkpoints
are deleted only once the newest is proven; and the last plausible one never is (`retention.py`).
What it costs: the first step after a save, or a load, waits for the device, to read its gradient
norm and loss.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.async_save import AsyncSaver
from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.storage import RECORD, list_steps, step_folder, sweep, write_step
from titanlite.checkpoint.write_plan import State
from titanlite.config.schema import CheckpointConfig
from titanlite.distributed.agreement import PATIENT, broadcast_from_rank0, gather
from titanlite.distributed.signals import FileRequest
from titanlite.distributed.watchdog import mark_phase
from titanlite.runtime.errors import ConfigError

if TYPE_CHECKING:
    from titanlite.checkpoint.retention import Retention
    from titanlite.optim.stability import Guard, Outcome

logger = logging.getLogger("titanlite")


class NonFinite(RuntimeError):
    """The gradient norm is NaN or infinite.

    The weights in memory are unusable; checkpoints are intact.
    """


class Checkpointer:
    """Saves and loads `states`, a name -> Stateful mapping, in `<run folder>/checkpoints`."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        states: dict[str, Any],
        extra_files: dict[str, bytes],
        facts: RunMetadata,
        device: torch.device,
    ) -> None:
        """`extra_files` (name -> content) are part of each checkpoint; they include model.json and
        data.json.
        """
        self.config = config
        self.states = states
        self.extra_files = extra_files
        self.facts = facts
        self.run_folder = folder
        self.folder = folder / "checkpoints"
        self.saver = AsyncSaver(config.async_mode, config.retries, device)
        self.newest = 0
        # The newest checkpoint; in this process it has not given a finite gradient yet
        self.unproven = False
        self.resumed = 0  # the step that this process has resumed from, while that is unproven
        self.returned = False  # to that step, in a rollback
        self.guard: Guard | None = None  # of [stability]
        self._saved_at = time.monotonic()
        self._file = FileRequest(folder / "SAVE")

    def load(self) -> bool:
        """Resumes from the newest usable checkpoint of this run; returns False if it has none.

        Raises ConfigError if `checkpoint.load` forbids it, the config contradicts the checkpoint,
        or all are unusable.
        """
        mark_phase("loading")
        used = [path for path in (self.folder, self.run_folder / "metrics.jsonl") if path.exists()]
        if self.config.load == "never" and used:
            raise ConfigError(
                f"checkpoint.load = never, but {used[0]} exists; choose another run.name or delete the run's folder"
            )
        if dist.get_rank() == 0:
            sweep(self.folder)
        saved = broadcast_from_rank0(
            lambda: bool(list_steps(self.folder)) or any(self.folder.glob("step-*.*"))
        )
        if broadcast_from_rank0(lambda: (self.run_folder / RECORD).exists()):
            from titanlite.checkpoint.divergence import apply_record

            apply_record(self)
        if saved or self.config.load_step:
            from titanlite.checkpoint.resume import resume  # only if there is something to read

            resume(self)
            return True
        weights = (
            f"the weights of {self.config.initial_load}"
            if self.config.initial_load
            else "new weights"
        )
        logger.info("no checkpoint in %s: starting with %s", self.folder, weights)
        return False

    @functools.cached_property
    def retention(self) -> Retention:
        from titanlite.checkpoint.retention import Retention

        return Retention(self.folder)

    def _state(self) -> State:
        return {name: part.state_dict() for name, part in self.states.items()}

    def wants_save(self) -> bool:
        """Whether this process requests a save: rank 0 does, when `freq_minutes` have passed or
        SAVE exists.
        """
        due = 0 < self.config.freq_minutes * 60 <= time.monotonic() - self._saved_at
        return self._file.seen() or (due and dist.get_rank() == 0)

    def wait_for_staging(self) -> None:
        """Waits until a save in progress has copied the parameters and the optimizer state, which
        may then change.
        """
        self.saver.wait_for_staging()

    @property
    def failed(self) -> bool:
        """Whether an asynchronous save has failed on this process."""
        return self.saver.failed

    def due(self, step: int, last: bool, asked: bool = False) -> bool:
        """Whether `maybe_save` would save after this step; `asked`: all ranks have agreed to a
        request.
        """
        regular = self.config.freq > 0 and step % self.config.freq == 0
        return step != self.newest and (last or asked or regular)

    def maybe_save(
        self, step: int, last: bool, asked: bool = False, validation_loss: float | None = None
    ) -> None:
        """Saves if it is due. All ranks call it together.

        Waits for the save after the last step, and for every save if saving is not asynchronous.
        Raises SaveError.
        """
        if not self.due(step, last, asked):
            return
        mark_phase("saving", on_host=True)
        self.newest = step
        self._saved_at = time.monotonic()
        self._file.open = False
        loss = (
            validation_loss
            if validation_loss is not None and math.isfinite(validation_loss)
            else None
        )
        facts = self.facts._replace(validation_loss=loss)
        self.unproven = True
        self.saver.save(self._state, functools.partial(self._write, step, facts, time.monotonic()))
        if last:
            self.close()

    def judge(self, outcome: Outcome) -> bool:
        """Proves the newest checkpoint if the outcome of a step is finite; rolls back or raises
        NonFinite if the run cannot go on.

        All ranks call it together. Returns whether the state was rolled back.
        """
        if not outcome.diverged:
            if outcome.finite and self.unproven:
                mark_phase("deleting old checkpoints")
                self.unproven = False
                self.resumed = 0
                self.returned = False
                if dist.get_rank() == 0:
                    vocab_size = json.loads(self.extra_files["model.json"])["vocab_size"]
                    losses = (outcome.loss, math.log(vocab_size))
                    self.saver.after_save(
                        functools.partial(self.retention.prove, self.newest, *losses, self.config)
                    )
            return False
        from titanlite.checkpoint.divergence import react

        why = react(self, outcome.step, outcome.description, outcome.acts_on)
        if why:
            raise NonFinite(why)
        return True

    def close(self) -> None:
        """Waits for the save in progress, on all ranks.

        Raises SaveError, or the process group's error.
        """
        self.saver.wait_for_staging()
        mark_phase("saving", on_host=True)
        self.saver.wait()
        # Rank 0 may still be deleting: a rank that exits earlier would end the run
        gather(None, PATIENT)

    def _write(
        self, step: int, facts: RunMetadata, started: float, state: State, failure: Exception | None
    ) -> None:
        manifest = write_step(self.folder, step, state, self.extra_files, facts, failure)
        if manifest is None:
            return
        seconds = time.monotonic() - started
        size = manifest.size / 1e9
        waited = self.saver.waited if self.saver.background else seconds
        logger.info(
            f"saved {step_folder(self.folder, step)}: {size:.3f} GB in {seconds:.2f} s, {size / seconds:.2f} GB/s, "
            f"training waited {waited:.3f} s",
            extra={"event": "save", "step": step},
        )
        if not manifest.finite:
            logger.warning(
                "step %d contains NaN or infinity: the run will not resume from it", step
            )
        self.retention.add(manifest)
