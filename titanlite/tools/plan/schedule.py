"""The learning rate and the batch size of a run, at the steps where they change.

What it is: `schedule_points` evaluates the schedule and the batch ramp of a config at the first and
last step, the end of the warmup, the beginning and the middle of a decay, each milestone and each
change of the batch size. Imports no torch.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from titanlite.config.batch_sizes import samples_after, segments
from titanlite.config.budget import warmup_problem
from titanlite.config.changes import milestones
from titanlite.config.schema import Config, ScheduleConfig
from titanlite.optim.schedule import lr_factor
from titanlite.tools.plan.amounts import short

MOST_CHANGES = 8  # of the batch size; of a finer ramp only the first and the last are listed
DECAYS = ("cosine", "linear", "wsd")


class Point(NamedTuple):
    """A step with a name, and the settings of the run in it."""

    name: str
    step: int
    tokens: int  # trained on by the end of the step
    lr: float
    sequences: int  # in the batch of the step


def schedule_points(config: Config) -> list[Point]:
    """The named steps in their order, for a config whose budget is in steps."""
    training = config.training
    total = training.steps
    points = []
    for step, name in sorted(_named_steps(config).items()):
        if step > total:
            continue
        after = samples_after(training, 0, step)
        before = samples_after(training, 0, step - 1)
        lr = config.optimizer.lr * lr_factor(config.schedule, step, total)
        points.append(Point(name, step, after * training.seq_len, lr, after - before))
    return points


def _named_steps(config: Config) -> dict[int, str]:
    """Step -> name. A step with two names keeps the first that is given here."""
    schedule = config.schedule
    total = config.training.steps
    warmup = max(1, schedule.warmup_steps)
    names = {total: "last step"}
    names.setdefault(warmup, "peak, end of warmup" if warmup > 1 else "peak")
    names.setdefault(1, "first step")
    if schedule.name == "step":
        for milestone in milestones(schedule.milestones):
            names.setdefault(milestone.step, "milestone")
    if schedule.name in DECAYS:
        begin = max(warmup, _stable_until(schedule, total))
        names.setdefault(begin, "end of stable phase")
        if begin < total:
            names.setdefault((begin + total) // 2, "middle of the decay")
    changes = segments(config.training)[1:]
    if len(changes) > MOST_CHANGES:
        changes = (changes[0], changes[-1])
    for change in changes:
        names.setdefault(change.step, "batch size")
    return names


def _stable_until(schedule: ScheduleConfig, total: int) -> int:
    """The last step before the decay; 0 if the decay follows the warmup."""
    if schedule.name != "wsd":
        return 0
    decay_steps = schedule.decay_steps or round(schedule.decay_fraction * total)
    return total - decay_steps


def schedule_lines(points: list[Point]) -> list[str]:
    """The points as a table of at most 80 columns."""
    lines = [
        "Learning rate and batch size",
        f"  {'':<22}{'step':>12}{'tokens':>12}{'learning rate':>16}{'sequences':>12}",
    ]
    for point in points:
        lines.append(
            f"  {point.name:<22}{point.step:>12,}{short(point.tokens):>12}{point.lr:>16.2e}"
            f"{point.sequences:>12,}"
        )
    return lines


def schedule_warnings(config: Config) -> list[str]:
    """Lines below the table: a warmup that is at least as long as the run."""
    problem = warmup_problem(config)
    if not problem:
        return []
    return textwrap.wrap(f"warning: {problem}", 80, initial_indent="  ", subsequent_indent="    ")
