"""The batch size of each step, which `training.batch_ramp` may change, and so its samples.

What it is: the entries of the ramp as segments. A segment begins at a step and a sample, and has
one batch size. The size of a step is a function of the config and of the samples used before it.
`64 from 4e9 tokens` begins with the first step that starts at that number of tokens or later. `64
by 8 from 4e9 tokens` divides the way there from the size before into equal parts (Megatron-LM's
`--rampup-batch-size`; GPT-3, arXiv 2005.14165, grew its batch linearly in tokens).
Why it is here: early in training the gradient noise is small compared with the gradient, and a
small batch makes the same progress with fewer tokens (arXiv 1812.06162). The data state stays one
integer: no step number is needed.
What it costs: a binary search per step.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from titanlite.config.changes import Change, read_changes
from titanlite.config.schema import PhaseConfig, TrainingConfig
from titanlite.runtime.errors import ConfigError

EXAMPLE = "32 from step 101, 64 by 8 from 4e9 tokens"
MAX_SIZES = 10_000  # per entry


class Segment(NamedTuple):
    """Steps with one batch size."""

    step: int  # the first step of the segment; the run's first is 1
    sample: int  # the number of samples before it
    size: int  # sequences per step
    begin: int  # a step after at least so many samples has this size; at most `sample`


@functools.lru_cache(maxsize=8)
def segments(training: TrainingConfig) -> tuple[Segment, ...]:
    """Computes the segments of a run. Raises ConfigError for a wrong ramp."""
    ramp = [Segment(1, 0, training.global_batch_size, 0)]
    for change in _changes(training):
        begin = ramp[-1]
        _append(ramp, change, training.seq_len)
        if ramp[-1] == begin:
            raise ConfigError(
                f"training.batch_ramp = {training.batch_ramp!r}: size {change.value:g} does not "
                f"begin after size {begin.size}, which begins with step {begin.step}; expected "
                "sizes in order, a step apart or more"
            )
    return tuple(ramp)


def first_steps(training: TrainingConfig) -> frozenset[int]:
    """Lists the run's first step and those with which a new batch size begins: they may compile."""
    return frozenset(segment.step for segment in segments(training))


def _changes(training: TrainingConfig) -> list[Change]:
    """Reads the entries of the ramp. Raises ConfigError for wrong ones."""
    key = f"training.batch_ramp = {training.batch_ramp!r}"
    before = training.global_batch_size
    problems = []
    if not training.batch_ramp:
        return []
    entries = read_changes("training.batch_ramp", training.batch_ramp, EXAMPLE, increments=True)
    for entry in entries:
        size = entry.value
        increment = entry.increment
        if not size or not size.is_integer() or not increment.is_integer():
            problems.append(
                f"{key}: size {size:g} by {increment:g}: expected whole numbers of sequences"
            )
        elif increment and (size <= before or (size - before) % increment):
            problems.append(
                f"{key}: an increment of {increment:g} does not lead from {before:g} to {size:g}; "
                "expected a divisor of their difference"
            )
        elif increment and (size - before) // increment > MAX_SIZES:
            problems.append(
                f"{key}: more than {MAX_SIZES} sizes up to {size:g}; expected a larger increment"
            )
        before = int(size)
    if problems:
        raise ConfigError(problems)
    return entries


def _append(ramp: list[Segment], change: Change, seq_len: int) -> None:
    """Adds the segments of an entry; parts too short for a step are left out."""
    begin = ramp[-1]
    end = int(change.value)
    increment = int(change.increment)
    sizes = [end]
    if increment:
        sizes = [*range(begin.size + increment, end, increment), end]
    for number, size in enumerate(sizes, 1):
        last = ramp[-1]
        threshold = 0
        if change.step:
            step = begin.step + _up((change.step - begin.step) * number, len(sizes))
        else:
            before = begin.sample * seq_len
            # Multiplied by the number of sizes, to stay an integer
            tokens = before * len(sizes) + (change.tokens - before) * number
            threshold = _up(tokens, len(sizes) * seq_len)
            step = last.step + _up(threshold - last.sample, last.size)
        if step > last.step:
            sample = last.sample + (step - last.step) * last.size
            ramp.append(Segment(step, sample, size, threshold or sample))
        elif last is not begin:  # the part before takes no step: this one replaces it
            ramp[-1] = last._replace(size=size, begin=threshold or last.begin)


def _up(number: int, divisor: int) -> int:
    """Divides and rounds up."""
    return -(-number // divisor)


def samples_after(training: TrainingConfig, samples: int, steps: int) -> int:
    """Computes the samples used `steps` steps after the run has used `samples`."""
    parts = segments(training)
    first = bisect.bisect_right(parts, samples, key=lambda part: part.begin) - 1
    for part, following in itertools.pairwise(parts[first:]):
        taken = min(steps, _up(max(0, following.begin - samples), part.size))
        samples = samples + taken * part.size
        steps = steps - taken
        if not steps:
            return samples
    return samples + steps * parts[-1].size


def steps_for(training: TrainingConfig, samples: int) -> int:
    """Computes the number of steps that use at least `samples` samples."""
    part = [part for part in segments(training) if part.sample < samples or part.step == 1][-1]
    return part.step - 1 + max(0, _up(samples - part.sample, part.size))


def steps_for_tokens(training: TrainingConfig, tokens: int) -> int:
    """Computes the number of steps that use at least `tokens` tokens."""
    return steps_for(training, _up(tokens, training.seq_len))


def first_sample(phase: PhaseConfig, training: TrainingConfig) -> int:
    """Computes the number of the first sample with the weights of a phase."""
    by_steps = samples_after(training, 0, max(0, phase.from_step - 1))
    return by_steps if phase.from_step else _up(phase.from_tokens, training.seq_len)


def size_problems(training: TrainingConfig, readers: int = 0) -> Iterator[str]:
    """Yields mistakes in the ramp, and batch sizes that cannot be divided into local batches.

    `readers`: the number of data-parallel ranks; 0 if it is not known yet.
    """
    local = training.local_batch_size
    portion = local * max(1, readers)
    over = f" times {readers} data-parallel processes ({portion})" if readers else ""
    remedy = ", or another local batch size" if readers else ""
    try:
        sizes = [segment.size for segment in segments(training)]
    except ConfigError as error:
        yield from error.problems
        sizes = [training.global_batch_size]
    wrong = [number for number, size in enumerate(sizes) if size % portion]
    if not wrong:
        return
    # The first size is that of the key, later ones are the ramp's
    key = "training.batch_ramp: the size" if wrong[0] else "training.global_batch_size ="
    size = sizes[wrong[0]]
    later = f" (and {len(wrong) - 1} later sizes)" if len(wrong) > 1 else ""
    below = size // portion * portion
    fitting = " or ".join(str(n) for n in (below, below + portion) if n)
    yield (
        f"{key} {size}{later} is not a multiple of training.local_batch_size = {local}{over}; "
        f"nearest: {fitting}{remedy}"
    )
