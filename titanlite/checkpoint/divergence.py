"""Divergence: what a run does when a step was bad, and what the next start of the same command
does.

What it is: with `stability.action = "rollback"` the run returns to its newest checkpoint, and the
samples of the bad step are excluded from then on. Otherwise, and after `max_rollbacks`, it ends.
Training that diverges in the process that saved a checkpoint resumes from this checkpoint. If it
diverges again before any step is finite, the checkpoint is the cause, or as good as: it is renamed,
and the run resumes from the one before. In a rollback that takes a second bad step, because the
first may be due to its samples.
At most three are renamed in a row, because then something else is the cause. After MAX_ATTEMPTS
divergences without a newer checkpoint the same command is refused, so that a supervisor does not
restart it for ever.
`stability.json` in the run's folder records both. It is written before anything else is changed, so
a run that is killed in a rollback excludes the same samples when it is started again. Checkpoints
saved later have these ranges too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.resume import exclude_samples, resume
from titanlite.checkpoint.retention import set_aside
from titanlite.checkpoint.storage import RECORD, list_steps, step_folder
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.observe.metrics_file import drop_later_lines
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded, replace_file

if TYPE_CHECKING:
    from titanlite.optim.stability import Verdict

logger = logging.getLogger("titanlite")

MAX_RENAMED = 3
MAX_ATTEMPTS = 5
HINT = "checkpoint.load_step = N selects another"


@dataclass
class Record:
    """The content of stability.json."""

    attempts: int = 0  # divergences in a row that ended this command, without a newer checkpoint
    newest: int = 0  # the newest checkpoint then
    config: str = ""  # hash of the command's settings
    last: str = ""  # the last divergence
    # Step, first, end: of the whole run
    rollbacks: list[dict[str, int]] = field(default_factory=list)


def read_record(folder: Path) -> Record:
    """The record in a run's folder, an empty one if there is none.

    Raises ConfigError if it is damaged.
    """
    path = folder / RECORD
    try:
        record = Record(**json.loads(read_bounded(path)))
        kinds = {name: type(value) for name, value in asdict(Record()).items()}
        good = all(type(value) is kinds[name] for name, value in vars(record).items())
        for entry in record.rollbacks if good else ():
            entry.pop("resumed", None)  # of an older version
            good &= entry.keys() == {"step", "first", "end"} and all(
                type(n) is int for n in entry.values()
            )
            good = good and 0 <= entry["first"] < entry["end"] < 1 << 62
        if good:
            return record
    except FileNotFoundError:
        return Record()
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise ConfigError(
        f"{path}: damaged; expected the JSON object that a run writes. Without this file the run would train on the "
        "samples that it excludes; if it never rolled back, the file can be deleted"
    )


def apply_record(run: Any) -> None:
    """Excludes the samples that a run (a `Checkpointer`) has excluded before; all ranks call it
    together.

    Raises ConfigError if the same command has diverged too often.
    """

    def check() -> list[dict[str, int]]:
        record = read_record(run.run_folder)
        newest = max(list_steps(run.folder), default=0)
        if (
            record.attempts >= MAX_ATTEMPTS
            and record.config == _hash(run)
            and newest <= record.newest
        ):
            raise ConfigError(
                f"{run.run_folder}: this command has diverged {record.attempts} times without a newer checkpoint than "
                f"step {record.newest}, the last time at {record.last}; expected a change, for example "
                "stability.action = skip or rollback, a lower optimizer.lr (with checkpoint.accept), a longer warmup, "
                f"other data, or an earlier checkpoint.load_step. To try the same again, delete {RECORD}"
            )
        return record.rollbacks

    _exclude(run, broadcast_from_rank0(check))


def react(run: Any, step: int, what: str, bad: Verdict | None) -> str:
    """Rolls a run (a `Checkpointer`) back and returns "", or returns why it must end. All ranks
    call it together.

    `step`: the current one; `what`: the bad step, in words; `bad`: the verdict on it, if there is a
    guard.
    """
    run.close()
    if bad is not None and run.guard.config.action == "rollback":
        rollbacks, problem = broadcast_from_rank0(lambda: _begin_rollback(run, bad))
        if not problem:
            run.guard.reset()
            _exclude(run, rollbacks)
            resume(run)
            run.returned = True
            broadcast_from_rank0(lambda: drop_later_lines(run.run_folder, run.newest))
            count = f"rollback {len(rollbacks)} of {run.guard.config.max_rollbacks}"
            logger.info(
                f"{what}; rolled back to step {run.newest}, and these samples are excluded in this epoch ({count})",
                extra={"event": "rollback", "step": bad.step},
            )
            return ""
        what = f"{what}; {problem}"
    elif bad is not None and run.guard.config.action == "skip":
        what = f"{what}; {bad.num_not_finite} steps in a row were not finite (stability.max_skips)"
    logger.info("%s: training has diverged", what, extra={"event": "diverged", "step": step})
    advice = broadcast_from_rank0(lambda: _end(run, what))
    return f"{what}: training has diverged; {advice}"


def _begin_rollback(run: Any, bad: Verdict) -> tuple[list[dict[str, int]], str]:
    """On rank 0: records the rollback, and renames a checkpoint that is the cause.

    Returns all, and what forbids it.
    """
    record = read_record(run.run_folder)
    steps = list_steps(run.folder)
    most = run.guard.config.max_rollbacks
    if not steps:
        return [], "there is nothing to roll back to, since no checkpoint was saved"
    if len(record.rollbacks) >= most:
        return (
            [],
            f"{len(record.rollbacks)} rollbacks were done already (stability.max_rollbacks = {most})",
        )
    record.rollbacks.append({"step": bad.step, "first": bad.first, "end": bad.end})
    _write(run, record)
    if run.returned:  # with other samples: a process that has just started may have met bad samples
        logger.info(step_back(run.folder, run.resumed, run.config.load_step > 0))
    return record.rollbacks, ""


def _exclude(run: Any, rollbacks: list[dict[str, int]]) -> None:
    exclude_samples(run, [(entry["first"], entry["end"]) for entry in rollbacks])
    if run.guard is not None:
        run.guard.rollbacks = len(rollbacks)


def _end(run: Any, what: str) -> str:
    """On rank 0: counts a divergence that ends the run; returns what the next start does."""
    advice = step_back(run.folder, run.resumed, run.config.load_step > 0)
    # a full disk or a damaged record must not hide the message
    with contextlib.suppress(OSError, ConfigError):
        record = read_record(run.run_folder)
        newest = max(list_steps(run.folder), default=0)
        same = _hash(run)
        if record.config != same or newest > record.newest:
            record.attempts = 0
            record.newest = newest
        record.attempts = record.attempts + 1
        record.config = same
        record.last = what[:500]
        _write(run, record)
        if record.attempts >= MAX_ATTEMPTS:
            advice += f"; after {record.attempts} times without a newer checkpoint, the same command will be refused"
    return advice


def _write(run: Any, record: Record) -> None:
    replace_file(run.run_folder / RECORD, json.dumps(asdict(record), indent=1).encode())


def _hash(run: Any) -> str:
    """A hash of all settings, as they are in a checkpoint."""
    return hashlib.sha256(json.dumps(run.facts.config, sort_keys=True).encode()).hexdigest()


def step_back(folder: Path, resumed: int, chosen: bool) -> str:
    """Renames the checkpoint of step `resumed` unless it is 0; returns what the next start resumes
    from, as a message.

    `resumed`: the step that this process has resumed from, if no step was finite since; `chosen`:
    by the user.
    """
    try:
        steps = list_steps(folder)
        if not resumed:
            return (
                f"the same command resumes from step {steps[-1]}; {HINT}"
                if steps
                else "no checkpoint was saved"
            )
        at_once = f"no step since step {resumed}, from which this run resumed, was finite"
        older = [step for step in steps if step < resumed]
        names = [path.name for path in folder.glob("step-*.diverged*")]
        renamed = [
            step
            for step in (int(name[5:].partition(".")[0]) for name in names)
            if older and step > older[-1]
        ]
        if chosen or not older or len(renamed) >= MAX_RENAMED:
            return f"{at_once}; {HINT}" + (
                f"; {len(renamed)} were renamed already" if renamed else ""
            )
        aside = set_aside(step_folder(folder, resumed), "diverged")
    except (OSError, ValueError) as error:
        return f"{error}; {HINT}"
    return f"{at_once}: renamed to {aside}; the same command resumes from step {older[-1]}; {HINT}"
