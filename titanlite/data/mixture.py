"""The mixture of several sources: the source of sample i, in proportion to the weights.

What it is: a pattern of 100,000 samples that repeats. Each source has its share of the pattern, a
whole number of samples that differs from the exact share by less than one, and its samples are
spread evenly over the pattern: sample m of c lies near (m + 1/2) / c of its length. Weights may
change at a given sample, where the next phase begins with its own pattern. A phase continues each
source where the phase before it stopped.
Why it is here: the source of sample i, and how many samples of that source came before, are
functions of i alone. No random draw has to be repeated on resuming, and the shares are exact, where
independent draws would vary.
What it costs: 0.6 MB and a few milliseconds per phase at the start; then a division and two
look-ups per sample.
"""

from __future__ import annotations

import bisect
import logging

import numpy as np

from titanlite.config.batch_sizes import first_sample
from titanlite.config.schema import DataConfig, TrainingConfig
from titanlite.runtime.errors import ConfigError

logger = logging.getLogger("titanlite")
PATTERN = 100_000  # samples


class Phase:
    """A pattern of sources that repeats, from sample number `first` on."""

    def __init__(self, weights: list[float], first: int, used: list[int]) -> None:
        """`used`: the number of samples of each source before `first`."""
        self.first = first
        self.used = used
        self.counts = pattern_counts(weights)
        # All samples of a pattern, source by source: index within the source, and place in [0, 1)
        numbers = np.concatenate([np.arange(count) for count in self.counts])
        lengths = np.repeat(self.counts, self.counts)  # samples of their source
        times = (numbers + 0.5) / lengths
        sources = np.repeat(np.arange(len(weights)), self.counts)

        order = np.lexsort((sources, times))  # by place; at equal places by source
        self.sources = sources[order].astype(np.uint16)  # one entry per sample of a pattern
        self.before = numbers[order].astype(np.int32)  # earlier samples of the same source

    def used_until(self, sample: int) -> list[int]:
        """Counts the samples of each source before this one."""
        repeats, num_samples = divmod(sample - self.first, PATTERN)
        # Samples of each source in the last, incomplete pattern
        partial = np.bincount(self.sources[:num_samples], minlength=len(self.counts)).tolist()
        totals = []  # sums of: before the phase, whole patterns, last pattern
        for used, count, in_last in zip(self.used, self.counts, partial, strict=True):
            totals.append(used + repeats * count + in_last)
        return totals


class Mixture:
    """The source of each sample, for weights that hold from given samples on."""

    def __init__(self, phases: list[tuple[int, list[float]]]) -> None:
        """`phases`: (first sample, weights of the sources), the first of them from sample 0."""
        self.starts = [first for first, _ in phases]
        self.phases = list[Phase]()
        used = [0] * len(phases[0][1])
        for first, weights in phases:
            if self.phases:
                used = self.phases[-1].used_until(first)
            self.phases.append(Phase(weights, first, used))

    def _phase(self, sample: int) -> Phase:
        return self.phases[bisect.bisect_right(self.starts, sample) - 1]

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the source of a sample, and the number of samples of this source before it."""
        phase = self._phase(sample)
        repeats, index = divmod(sample - phase.first, PATTERN)
        source = int(phase.sources[index])
        in_pattern = int(phase.before[index])
        return source, phase.used[source] + repeats * phase.counts[source] + in_pattern

    def used(self, samples: int) -> list[int]:
        """Counts the samples of each source among the first `samples`."""
        return self._phase(samples).used_until(samples)


def pattern_counts(weights: list[float]) -> list[int]:
    """Computes how many samples of each source a pattern has.

    Exact shares are rounded down; the samples left over go to the largest remainders.
    """
    total = sum(weights)
    exact = [weight / total * PATTERN for weight in weights]
    counts = [int(share) for share in exact]
    # The largest remainder comes first
    by_remainder = sorted(range(len(weights)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: PATTERN - sum(counts)]:
        counts[source] += 1
    return counts


def build_mixture(section: DataConfig, training: TrainingConfig) -> Mixture:
    """Builds the mixture of a config's sources and phases; logs the shares if there are several.

    Raises ConfigError for a weight that is too small for a sample in each pattern.
    """
    sources = section.all_sources()
    names = [source.name for source in sources]
    phases = [(0, [source.weight for source in sources])]
    for phase in section.phases:
        by_name = dict(phase.weights)
        phases.append((first_sample(phase, training), [by_name[name] for name in names]))
    for i, (first, weights) in enumerate(phases):
        _require_samples("data.sources" if i == 0 else f"data.phases[{i}]", names, weights)
        if len(names) > 1:
            logger.info(f"data from sample {first} on: {_shares(names, weights)}")
    return Mixture(phases)


def _require_samples(key: str, names: list[str], weights: list[float]) -> None:
    """Raises ConfigError for a weight above 0 that gets no sample in a pattern."""
    for name, weight, count in zip(names, weights, pattern_counts(weights), strict=True):
        if weight and not count:
            least = f"at least {sum(weights) / PATTERN:.3g}, or 0"
            raise ConfigError(
                f"{key}: the weight of {name}, {weight}, is too small; expected {least}"
            )


def _shares(names: list[str], weights: list[float]) -> str:
    """Writes the sources with their percentages, for the log."""
    total = sum(weights)
    percentages = [100 * weight / total for weight in weights]
    shares = [f"{name} {share:.2f}%" for name, share in zip(names, percentages, strict=True)]
    text = ", ".join(shares)
    if abs(total - 1) >= 1e-6:
        text += f" (the weights sum to {total:.6g} and were divided by that)"
    return text
