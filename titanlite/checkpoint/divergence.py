"""Divergence: what a run does after a bad step, and what the next start of its command does.

What it is: with `stability.action = "rollback"` the run returns to its newest checkpoint, and the
samples of the bad step are excluded from then on. Otherwise, and after `max_rollbacks`, it ends.
Training that diverges in the process that saved a checkpoint resumes from this checkpoint. If it
diverges again before any step is finite, the checkpoint is probably the cause: it is renamed, and
the run resumes from the one before. In a rollback that takes a second bad step, because the first
may be due to its samples. One is renamed in a row, because then something else is the cause. How
often a command is started again is for its supervisor to limit.

`stability.json` in the run's folder records the rollbacks. It is written before anything else is
changed, so a run that is killed in a rollback excludes the same samples when it is started again.

The functions here only read and write that file and rename checkpoints; `manager.py` does what
they return.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint.folders import RECORD, list_steps, step_folder
from titanlite.checkpoint.retention import set_aside
from titanlite.data.excluded import Range, as_ranges
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.optim.stability import Verdict
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.runtime.typed_json import Count, typed

logger = logging.getLogger("titanlite")

HINT = "checkpoint.load_step = N selects another"


class Suspect(NamedTuple):
    """The checkpoint that may be the cause of a divergence."""

    step: int  # resumed from, and no later step was finite; 0: none
    chosen: bool  # the user chose it by checkpoint.load_step: do not rename it


class Rollback(NamedTuple):
    """Whether a run may return to its newest checkpoint."""

    excluded: list[Range]  # samples of bad steps, over all rollbacks of the run
    problem: str  # why it may not; "" if it may


@dataclass(frozen=True)
class BadStep:
    """A step from which the run rolled back, with the range of its samples."""

    step: Count
    first: Count
    end: Count


@dataclass(frozen=True)
class Record:
    """The content of stability.json."""

    rollbacks: list[BadStep]  # of the run

    @property
    def excluded(self) -> list[Range]:
        return [(bad.first, bad.end) for bad in self.rollbacks]


def read_record(folder: Path) -> Record:
    """Reads the record in a run's folder; returns an empty one if there is none.

    Raises ConfigError if it is damaged.
    """
    path = folder / RECORD
    try:
        record = typed(Record, read_json(path))
        if all(first < end for first, end in record.excluded):
            return record
    except FileNotFoundError:
        return Record([])
    except ValueError:
        pass
    raise ConfigError(
        f"{path}: damaged; expected the JSON object that a run writes. Without this file the run "
        "would train on the samples that it excludes; if it never rolled back, the file can be "
        "deleted"
    )


def excluded_before(run_folder: Path) -> list[Range]:
    """Returns the samples that earlier rollbacks excluded; all ranks call it together."""
    return as_ranges(broadcast_from_rank0(lambda: read_record(run_folder).excluded))


def begin_rollback(
    run_folder: Path, verdict: Verdict, max_rollbacks: int, suspect: Suspect
) -> Rollback:
    """Records a rollback, and renames the checkpoint that is the cause, if one is suspected.

    All ranks call it together.
    """

    def begin() -> Rollback:
        record = read_record(run_folder)
        done = len(record.rollbacks)
        if not list_steps(run_folder / "checkpoints"):
            return Rollback([], "there is nothing to roll back to, since no checkpoint was saved")
        if done >= max_rollbacks:
            limit = f"(stability.max_rollbacks = {max_rollbacks})"
            return Rollback([], f"{done} rollbacks were done already {limit}")
        record.rollbacks.append(BadStep(verdict.step, verdict.first, verdict.end))
        content = json.dumps(asdict(record), indent=1)
        replace_file(run_folder / RECORD, content.encode())
        if suspect.step:
            logger.info(step_back(run_folder, suspect))
        return Rollback(record.excluded, "")

    excluded, problem = broadcast_from_rank0(begin)
    return Rollback(as_ranges(excluded), problem)


def step_back(run_folder: Path, suspect: Suspect) -> str:
    """Renames the suspected checkpoint, if there is one, so that the next start takes an older one.

    Runs on rank 0. Returns a message about what the next start resumes from.
    """
    folder = run_folder / "checkpoints"
    try:
        steps = list_steps(folder)
        if not suspect.step:
            if not steps:
                return "no checkpoint was saved"
            return f"the same command resumes from step {steps[-1]}; {HINT}"
        at_once = f"no step since step {suspect.step}, from which this run resumed, was finite"
        older = [step for step in steps if step < suspect.step]
        if suspect.chosen or not older:
            return f"{at_once}; {HINT}"
        if _was_renamed_after(folder, older[-1]):
            return f"{at_once}; one was renamed already, so the cause is another; {HINT}"
        aside = set_aside(step_folder(folder, suspect.step), "diverged")
    except (OSError, ValueError) as error:
        return f"{error}; {HINT}"
    return f"{at_once}: renamed to {aside}; the same command resumes from step {older[-1]}; {HINT}"


def _was_renamed_after(folder: Path, step: int) -> bool:
    """Whether a checkpoint that is newer than `step` has been renamed as diverged."""
    for path in folder.glob("step-*.diverged*"):
        if int(path.name.removeprefix("step-").partition(".")[0]) > step:
            return True
    return False
