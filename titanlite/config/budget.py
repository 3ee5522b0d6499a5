"""Replaces budgets in tokens and epochs by numbers of steps, once.

What it is: when the config is read, `training.tokens` becomes `training.steps`, and the keys of the
schedule that count tokens or a part of the run become keys that count steps. `training.epochs` and
`freq_epochs` of validation and checkpoints follow at the start of a run, when the length of the
text is known. All are rounded up to whole steps, whose sizes follow `training.batch_ramp`. Tokens
are positions of sequences here: `data.packing = best_fit` fills some with padding, and how many is
not known yet. All other code reads steps only, and a run's config.toml contains steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeVar

from titanlite.config.batch_sizes import samples_after, steps_for, steps_for_tokens
from titanlite.config.changes import milestones
from titanlite.config.schema import (
    CheckpointConfig,
    Config,
    ScheduleConfig,
    TrainingConfig,
    ValidationConfig,
)
from titanlite.runtime.errors import ConfigError

Saved = TypeVar("Saved", CheckpointConfig, ValidationConfig)  # sections with freq and freq_epochs


def epoch_problems(config: Config) -> Iterator[str]:
    """Yields keys that count epochs although sources or batch sizes make epochs differ."""
    num_sources = len(config.data.sources)
    for section, name, remedy in (
        ("training", "epochs", "training.tokens or training.steps"),
        ("checkpoint", "freq_epochs", "checkpoint.freq"),
        ("validation", "freq_epochs", "validation.freq"),
    ):
        value = getattr(getattr(config, section), name)
        shown = f"{section}.{name} = {value}"
        if value and num_sources > 1:
            yield (
                f"{shown}, with {num_sources} data.sources that have different epochs; "
                f"expected {remedy}"
            )
        elif value and name == "freq_epochs" and config.training.batch_ramp:
            yield (
                f"{shown}, with training.batch_ramp, where epochs have different numbers of "
                f"steps; expected {remedy}"
            )


def in_steps(config: Config) -> Config:
    """Replaces numbers of tokens in the config by numbers of steps.

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
    if schedule.warmup_ratio and not training.epochs:
        schedule = _warmup_in_steps(schedule, training)
    if schedule.decay_steps or schedule.decay_tokens:
        schedule = dataclasses.replace(schedule, decay_fraction=0.0)
    if schedule.decay_tokens and not training.epochs:
        schedule = _decay_in_steps(schedule, training)
    if schedule.name == "step":
        schedule = _milestones_in_steps(schedule, training)
    checkpoint = config.checkpoint
    if checkpoint.freq_epochs:  # it counts instead of the default of `freq`
        checkpoint = dataclasses.replace(checkpoint, freq=0)
    return dataclasses.replace(config, training=training, schedule=schedule, checkpoint=checkpoint)


def warmup_problem(config: Config) -> str:
    """Writes a warning if the run ends within its warmup, or with it; empty otherwise.

    The budget of `config` is in steps; while it is in epochs, nothing is known.
    """
    steps = config.training.steps
    warmup = config.schedule.warmup_steps
    if warmup <= 1 or warmup < steps or config.training.epochs or config.schedule.warmup_ratio:
        return ""
    reached = f"the peak rate {config.optimizer.lr:g} is that of the last step alone"
    if warmup > steps:
        reached = f"the last rate is {config.optimizer.lr * steps / warmup:g}, and the peak rate "
        reached += f"{config.optimizer.lr:g} is never reached"
    return (
        f"schedule.warmup_steps = {warmup}, and the run has {steps} steps: {reached}; expected "
        "fewer warmup steps, or schedule.warmup_ratio"
    )


def epochs_in_steps(config: Config, count: int) -> Config:
    """Replaces epochs in the config by steps; returns it unchanged if no key counts epochs.

    `count`: the number of samples of an epoch. If a key counts epochs, the run has one source.
    """
    training = config.training
    schedule = config.schedule
    if training.epochs:
        steps = _steps_for_epochs(training, training.epochs, count)
        training = dataclasses.replace(training, steps=steps, epochs=0.0)
        if schedule.warmup_ratio:
            schedule = _warmup_in_steps(schedule, training)
        if schedule.decay_tokens:
            schedule = _decay_in_steps(schedule, training)
    return dataclasses.replace(
        config,
        training=training,
        schedule=schedule,
        checkpoint=_freq_in_steps(config.checkpoint, training, count),
        validation=_freq_in_steps(config.validation, training, count),
    )


def _steps_for_epochs(training: TrainingConfig, epochs: float, count: int) -> int:
    """Computes the number of steps for so many passes over `count` samples."""
    # Exact decimal arithmetic: in binary, 1.1 * 100 is more than 110
    return steps_for(training, math.ceil(Fraction(str(epochs)) * count))


def _freq_in_steps(section: Saved, training: TrainingConfig, count: int) -> Saved:
    """Replaces `freq_epochs`, if it is set, by a number of steps."""
    if not section.freq_epochs:
        return section
    freq = max(1, _steps_for_epochs(training, section.freq_epochs, count))
    return dataclasses.replace(section, freq=freq, freq_epochs=0.0)


def _warmup_in_steps(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    """Replaces `warmup_ratio`, a part of the run, by a number of steps."""
    steps = math.ceil(Fraction(str(schedule.warmup_ratio)) * training.steps)
    return dataclasses.replace(schedule, warmup_steps=steps, warmup_ratio=0.0)


def _decay_in_steps(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    """Replaces `decay_tokens` by the number of last steps that have at least so many tokens."""
    decayed_samples = math.ceil(Fraction(schedule.decay_tokens, training.seq_len))
    before = samples_after(training, 0, training.steps) - decayed_samples
    first = steps_for(training, max(0, before))
    # `steps_for` rounds up, and the decay must have all of its tokens
    if before <= 0 or samples_after(training, 0, first) > before:
        first = max(0, first - 1)
    return dataclasses.replace(
        schedule, decay_steps=training.steps - first, decay_tokens=0, decay_fraction=0.0
    )


def _milestones_in_steps(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    """Converts milestones to steps: that of N tokens is the first step that begins after them."""
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
