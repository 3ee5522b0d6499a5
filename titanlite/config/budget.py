"""Budgets in tokens and epochs: replaced by numbers of steps, once.

What it is: when the config is read, `training.tokens` becomes `training.steps`, and the keys of the
schedule that count tokens become those that count steps; at the start of a run, when the length of
the text is known, so does `training.epochs`. All are rounded up to whole steps, of the sizes that
the steps have with `training.batch_ramp`. All other code reads steps only, and a run's config.toml
contains steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from titanlite.config.batch_sizes import samples_after, steps_for, steps_for_tokens
from titanlite.config.changes import milestones
from titanlite.config.schema import Config, ScheduleConfig, TrainingConfig
from titanlite.runtime.errors import ConfigError


def in_steps(config: Config) -> Config:
    """The config with numbers of steps in place of numbers of tokens.

    Raises ConfigError for wrong milestones.
    """
    training = config.training
    schedule = config.schedule
    if training.tokens:
        steps = steps_for_tokens(training, training.tokens)
        training = dataclasses.replace(training, steps=steps, tokens=0)
    if schedule.warmup_tokens:
        steps = steps_for_tokens(training, schedule.warmup_tokens)
        schedule = dataclasses.replace(schedule, warmup_steps=steps, warmup_tokens=0)
    if schedule.decay_steps:
        schedule = dataclasses.replace(schedule, decay_fraction=0.0)
    if schedule.decay_tokens and not training.epochs:
        schedule = _decay_in_steps(schedule, training)
    if schedule.name == "step":
        schedule = _milestones_in_steps(schedule, training)
    return dataclasses.replace(config, training=training, schedule=schedule)


class HasSources(Protocol):
    """What `build_samples` returns: the training samples, of one source or several."""

    @property
    def rows(self) -> Sequence[Countable]:
        """The rows of each source."""


class Countable(Protocol):
    """The rows of a source, of which `count` are an epoch."""

    @property
    def count(self) -> int: ...


def epochs_in_steps(config: Config, samples: HasSources) -> Config:
    """The config with steps in place of `training.epochs`; as it is if that is 0.

    `samples` are the run's, which have one source if `training.epochs` is set.
    """
    training = config.training
    schedule = config.schedule
    if not training.epochs:
        return config
    # As a decimal fraction: 1.1 * 100 is more than 110 in binary
    needed = math.ceil(Fraction(str(training.epochs)) * samples.rows[0].count)
    training = dataclasses.replace(training, steps=steps_for(training, needed), epochs=0.0)
    if schedule.decay_tokens:
        schedule = _decay_in_steps(schedule, training)
    return dataclasses.replace(config, training=training, schedule=schedule)


def _decay_in_steps(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    """The number of last steps that together have at least `decay_tokens` tokens."""
    decayed_samples = math.ceil(Fraction(schedule.decay_tokens, training.seq_len))
    before = samples_after(training, 0, training.steps) - decayed_samples
    first = steps_for(training, max(0, before))
    if before <= 0 or samples_after(training, 0, first) > before:
        first = max(0, first - 1)
    return dataclasses.replace(
        schedule, decay_steps=training.steps - first, decay_tokens=0, decay_fraction=0.0
    )


def _milestones_in_steps(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    """The milestones in steps. A number of tokens is the first step that begins with so many."""
    key = "schedule.milestones"
    entries = milestones(schedule.milestones)
    steps = [entry.step or steps_for_tokens(training, entry.tokens) + 1 for entry in entries]
    ratios = [entry.value for entry in entries]
    if sorted(set(steps)) != steps or sorted(ratios, reverse=True) != ratios:
        raise ConfigError(f"{key} = {schedule.milestones!r}: expected later steps with lower rates")
    if not schedule.min_ratio <= ratios[-1] <= ratios[0] <= 1:
        allowed = f"schedule.min_ratio = {schedule.min_ratio} to 1"
        raise ConfigError(
            f"{key} = {schedule.milestones!r}: expected parts of the peak rate from {allowed}"
        )
    texts = (f"{ratio:.16g} from step {step}" for ratio, step in zip(ratios, steps, strict=True))
    return dataclasses.replace(schedule, milestones=", ".join(texts))
