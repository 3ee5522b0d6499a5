"""Divergence: what a run does after a bad step, and what the next start of its command does.

What it is: with `stability.action = "rollback"` the run returns to its newest checkpoint, and the
samples of the bad step are excluded from then on. Otherwise, and after `max_rollbacks`, it ends.
Training that diverges in the process that saved a checkpoint resumes from this checkpoint. If it
diverges again before any step is finite, the checkpoint is probably the cause: it is renamed, and
the run resumes from the one before. In a rollback that takes a second bad step, because the first
may be due to its samples. At most three are renamed in a row, because then something else is the
cause. After MAX_ATTEMPTS divergences without a newer checkpoint the same command is refused, so
that a supervisor does not restart it for ever.

`stability.json` in the run's folder records the rollbacks and the attempts. It is written before
anything else is changed, so a run that is killed in a rollback excludes the same samples when it is
started again.

The functions here only read and write that file and rename checkpoints; `manager.py` does what
they return.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint.folders import RECORD, list_steps, step_folder
from titanlite.checkpoint.manifest import Settings
from titanlite.checkpoint.retention import set_aside
from titanlite.data.excluded import Range
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.optim.stability import Verdict
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file

logger = logging.getLogger("titanlite")

MAX_RENAMED = 3
MAX_ATTEMPTS = 5
HINT = "checkpoint.load_step = N selects another"


class Suspect(NamedTuple):
    """The checkpoint that may be the cause of a divergence."""

    step: int  # resumed from, and no later step was finite; 0: none
    chosen: bool  # the user chose it by checkpoint.load_step: do not rename it


class Rollback(NamedTuple):
    """Whether a run may return to its newest checkpoint."""

    excluded: list[Range]  # samples of bad steps, over all rollbacks of the run
    problem: str  # why it may not; "" if it may


@dataclass
class Record:
    """The content of stability.json."""

    attempts: int = 0  # divergences in a row that ended this command without a newer checkpoint
    newest: int = 0  # the newest checkpoint at the last divergence
    config: str = ""  # hash of the command's settings
    last: str = ""  # the last divergence
    # One entry per rollback of the run: step, first, end
    rollbacks: list[dict[str, int]] = field(default_factory=list)

    @property
    def excluded(self) -> list[Range]:
        return [(entry["first"], entry["end"]) for entry in self.rollbacks]


def read_record(folder: Path) -> Record:
    """Reads the record in a run's folder; returns an empty one if there is none.

    Raises ConfigError if it is damaged.
    """
    path = folder / RECORD
    try:
        record = Record(**read_json(path))
        if _is_valid(record):
            return record
    except FileNotFoundError:
        return Record()
    except (ValueError, TypeError, AttributeError):
        pass
    raise ConfigError(
        f"{path}: damaged; expected the JSON object that a run writes. Without this file the run "
        "would train on the samples that it excludes; if it never rolled back, the file can be "
        "deleted"
    )


def _is_valid(record: Record) -> bool:
    """Whether all fields of a record from a file are of the right types."""
    for name, default in vars(Record()).items():
        if type(getattr(record, name)) is not type(default):
            return False
    for entry in record.rollbacks:
        entry.pop("resumed", None)  # a field of older versions
        if entry.keys() != {"step", "first", "end"}:
            return False
        if not all(type(number) is int for number in entry.values()):
            return False
        if not 0 <= entry["first"] < entry["end"] < 1 << 62:
            return False
    return True


def excluded_before(run_folder: Path, settings: Settings) -> list[Range]:
    """Returns the samples that earlier rollbacks excluded; all ranks call it together.

    Raises ConfigError if a command with these settings has diverged too often.
    """

    def check() -> list[Range]:
        record = read_record(run_folder)
        newest = _newest_step(run_folder)
        same_command = record.config == _hash(settings)
        if record.attempts >= MAX_ATTEMPTS and same_command and newest <= record.newest:
            raise ConfigError(
                f"{run_folder}: this command has diverged {record.attempts} times without a newer "
                f"checkpoint than step {record.newest}, the last time at {record.last}; expected a "
                "change, for example stability.action = skip or rollback, a lower optimizer.lr "
                "(with checkpoint.accept), a longer warmup, other data, or an earlier "
                f"checkpoint.load_step. To try the same again, delete {RECORD}"
            )
        return record.excluded

    return _as_ranges(broadcast_from_rank0(check))


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
        record.rollbacks.append({"step": verdict.step, "first": verdict.first, "end": verdict.end})
        _write(run_folder, record)
        if suspect.step:
            logger.info(step_back(run_folder, suspect))
        return Rollback(record.excluded, "")

    excluded, problem = broadcast_from_rank0(begin)
    return Rollback(_as_ranges(excluded), problem)


def end_command(run_folder: Path, settings: Settings, description: str, suspect: Suspect) -> str:
    """Counts a divergence that ends the run, and renames the checkpoint that is the cause.

    All ranks call it together. Returns a message about what the next start does.
    """

    def end() -> str:
        advice = step_back(run_folder, suspect)
        # A full disk or a damaged record must not hide the message
        with contextlib.suppress(OSError, ConfigError):
            record = _count_attempt(run_folder, settings, description)
            if record.attempts >= MAX_ATTEMPTS:
                advice += (
                    f"; after {record.attempts} times without a newer checkpoint, "
                    "the same command will be refused"
                )
        return advice

    advice: str = broadcast_from_rank0(end)
    return advice


def _count_attempt(run_folder: Path, settings: Settings, description: str) -> Record:
    record = read_record(run_folder)
    newest = _newest_step(run_folder)
    command = _hash(settings)
    if record.config != command or newest > record.newest:
        record.attempts = 0
        record.newest = newest
    record.attempts += 1
    record.config = command
    record.last = description[:500]
    _write(run_folder, record)
    return record


def _newest_step(run_folder: Path) -> int:
    return max(list_steps(run_folder / "checkpoints"), default=0)


def _as_ranges(pairs: Sequence[Sequence[int]]) -> list[Range]:
    """Restores ranges from JSON, in which a tuple is a list."""
    return [(first, end) for first, end in pairs]


def _write(run_folder: Path, record: Record) -> None:
    replace_file(run_folder / RECORD, json.dumps(asdict(record), indent=1).encode())


def _hash(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


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
        renamed = _renamed_since(folder, older)
        if suspect.chosen or not older or renamed >= MAX_RENAMED:
            before = f"; {renamed} were renamed already" if renamed else ""
            return f"{at_once}; {HINT}{before}"
        aside = set_aside(step_folder(folder, suspect.step), "diverged")
    except (OSError, ValueError) as error:
        return f"{error}; {HINT}"
    return f"{at_once}: renamed to {aside}; the same command resumes from step {older[-1]}; {HINT}"


def _renamed_since(folder: Path, older: list[int]) -> int:
    """Counts the diverged checkpoints newer than the last of `older`: renamed in a row."""
    count = 0
    for path in folder.glob("step-*.diverged*"):
        step = int(path.name.removeprefix("step-").partition(".")[0])
        if older and step > older[-1]:
            count += 1
    return count
