"""Findings about a loss curve: its spikes, and how much the loss has fallen lately.

What it is:

    spike          a loss more than THRESHOLD robust standard deviations above the median of the
                   WINDOW logged losses before it. The deviation is 1.4826 MAD of these losses, as
                   in `optim/stability.py`.
    improvement    the mean of the last tenth of the logged losses, beside the mean of the tenth
                   before it.

Why it is here: a loss falls all the time, so a fixed threshold would take the first steps for a
spike. While the loss falls, the median of the losses before is above the next one, so a fall is
never a spike. It makes the deviation larger, and a small spike in a steep part may be missed. The
guard takes the slope out; its extrapolation, right after a steep part, would be called a spike.
What it costs: 2 s for a million logged losses.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

WINDOW = 48  # logged losses before the one that is judged
THRESHOLD = 8.0
FLOOR = 1e-3  # least deviation, as a fraction of the median: see optim/stability.py
PART = 0.1  # of the logged losses, whose mean is compared
FEWEST = 8  # losses in such a part
CHUNK = 1 << 16  # windows that are in memory at a time


@dataclass(frozen=True)
class Spike:
    """Neighbouring losses that are too high, and the highest of them by its distance `z`."""

    first: int
    last: int
    peak: int
    value: float
    z: float


@dataclass(frozen=True)
class Mean:
    """The mean loss of some logged steps."""

    first: int
    last: int
    count: int
    value: float
    error: float  # standard error of the mean


@dataclass(frozen=True)
class Improvement:
    """The mean loss of the last part of a run, and of the part before it."""

    before: Mean
    last: Mean

    @property
    def fall(self) -> float:
        return self.before.value - self.last.value

    @property
    def error(self) -> float:
        """The standard error of the fall, if the losses are independent."""
        return float(np.hypot(self.before.error, self.last.error))


def find_spikes(steps: np.ndarray, values: np.ndarray) -> list[Spike]:
    """The spikes in the order of their steps. The first WINDOW losses are not judged."""
    spikes = list[Spike]()
    if len(values) <= WINDOW:
        return spikes
    z = _distances(values)
    previous = -1
    for i in np.flatnonzero(z > THRESHOLD).tolist():
        row = WINDOW + i
        step = int(steps[row])
        height = float(z[i])
        if previous == row - 1:
            spike = dataclasses.replace(spikes[-1], last=step)
            if height > spike.z:
                spike = dataclasses.replace(spike, peak=step, value=float(values[row]), z=height)
            spikes[-1] = spike
        else:
            spikes.append(Spike(step, step, step, float(values[row]), height))
        previous = row
    return spikes


def _distances(values: np.ndarray) -> np.ndarray:
    """The distance of each loss, from number WINDOW on, to those before it, in deviations."""
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], WINDOW)
    judged = values[WINDOW:]
    z = np.empty(len(judged))
    for start in range(0, len(judged), CHUNK):
        part = slice(start, start + CHUNK)
        before = windows[part]  # (losses, WINDOW)
        medians = np.median(before, axis=1)
        mad = np.median(np.abs(before - medians[:, None]), axis=1)
        deviations = np.maximum(1.4826 * mad, FLOOR * np.abs(medians) + 1e-12)
        z[part] = (judged[part] - medians) / deviations
    return z


def improvement(steps: np.ndarray, values: np.ndarray) -> Improvement | None:
    """The last two parts of the run; None if fewer than two times FEWEST losses were logged."""
    count = max(FEWEST, round(PART * len(values)))
    if len(values) < 2 * count:
        return None
    last = _mean(steps[-count:], values[-count:])
    return Improvement(_mean(steps[-2 * count : -count], values[-2 * count : -count]), last)


def _mean(steps: np.ndarray, values: np.ndarray) -> Mean:
    error = values.std(ddof=1) / len(values) ** 0.5
    return Mean(int(steps[0]), int(steps[-1]), len(values), float(values.mean()), float(error))
