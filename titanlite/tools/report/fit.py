"""The trend of a loss, and what departs from it: spikes and plateaus.

What it is: the trend is a power law, L(s) = E + A s^-b with E, A, b >= 0, where s is the step: E is
the loss that the run approaches, b how fast. It is fitted to the medians of BINS bins of equal
width in log(s), so that the many late steps do not outweigh the early ones and spikes do not count.
For each b of a grid, E and A minimise the sum of absolute deviations (least squares, reweighted);
the b with the smallest sum is taken.
Why it is here: a loss falls all the time, so a fixed threshold takes the first steps for a spike,
and a flat stretch near the end, where little is left to fall, for a plateau. Both are judged after
the trend has been removed:

    spike      a value that is THRESHOLD robust standard deviations above the local median of what is left, and
               far above the steps just before it. The deviation is 1.4826 MAD, as in `optim/stability.py`.
    plateau    a quarter of the run in which the loss has not fallen, though the power law of the steps before it
               predicts a fall larger than the noise.

With fewer than FEWEST logged steps after the warmup neither can be decided, and nothing is
returned.
What it costs: 0.4 s for 10,000 steps, most of it for plateaus; 2.5 s for a million.
Reference: Hestness et al. 2017 (arXiv 1712.00409); here over the steps of one run, which a schedule
may bend.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

FEWEST = 40  # logged steps after the warmup
BINS = 80
THRESHOLD = 8.0
FLOOR = 1e-3  # least deviation, as a fraction of the value: see optim/stability.py
BLOCKS = 12  # of the local median: at least so many, of at least SHORTEST values
SHORTEST = 16
LONGEST = 64
# Of a plateau, as fractions of the run
WINDOW = 0.25
STRIDE = 0.05
EARLIEST = 0.35


@dataclass(frozen=True)
class PowerLaw:
    """L(s) = floor + scale * s^-exponent."""

    floor: float
    scale: float
    exponent: float
    exponents: tuple[float, float]  # between which the sum of deviations is at most 10% larger
    floors: tuple[float, float]  # of these
    first: int  # steps that it was fitted to
    last: int
    count: int
    noise: float  # 1.4826 MAD of the deviations

    def __call__(self, steps: np.ndarray) -> np.ndarray:
        return self.floor + self.scale * np.asarray(steps, float) ** -self.exponent


@dataclass(frozen=True)
class Spike:
    first: int
    last: int
    peak: int
    value: float
    z: float


@dataclass(frozen=True)
class Plateau:
    first: int
    last: int
    fall: float  # measured
    error: float  # its standard error
    expected: float


@dataclass(frozen=True)
class Trend:
    """What was found in a loss curve; `law` is None if there are too few steps, with the reason in
    `why`.
    """

    law: PowerLaw | None
    spikes: list[Spike]
    plateaus: list[Plateau]
    # Whether there was a part in which a plateau could be distinguished from noise
    judged: bool = False
    why: str = ""


def trend(steps: np.ndarray, values: np.ndarray, warmup: int) -> Trend:
    """The trend of the loss at these steps, of which those of the learning rate's warmup are left
    out.
    """
    if len(steps) == 0:
        return Trend(None, [], [], why="no loss has been logged")
    begin = max(warmup, int(steps[-1]) // 20, 1)
    used = steps > begin
    s = steps[used]
    v = values[used]
    if len(s) < FEWEST:
        return Trend(
            None,
            [],
            [],
            why=f"{len(s)} steps were logged after the warmup, and a fit needs {FEWEST}",
        )
    law = fit_power_law(s, v)
    return Trend(law, find_spikes(s, v, law), *find_plateaus(s, v))


def fit_power_law(steps: np.ndarray, values: np.ndarray) -> PowerLaw:
    """The power law of at least a few positive steps, in ascending order."""
    s, v = _bin_medians(steps, values)
    unit = s[-1]
    grid = np.geomspace(0.02, 3.0, 40)
    sums, found = zip(*(_fit_linear((s / unit) ** -b, v) for b in grid), strict=True)
    best = int(np.argmin(sums))
    fine = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 21)
    exponents = np.concatenate([grid, fine])
    more, others = zip(*(_fit_linear((s / unit) ** -b, v) for b in fine), strict=True)
    deviations = np.array(sums + more)
    results = np.array(found + others)
    best = int(deviations.argmin())
    near = deviations <= 1.1 * deviations[best] + 1e-12
    b, (floor, scale) = float(exponents[best]), results[best]
    law = floor + scale * (steps / unit) ** -b
    return PowerLaw(
        float(floor),
        float(scale * unit**b),
        b,
        (float(exponents[near].min()), float(exponents[near].max())),
        (float(results[near, 0].min()), float(results[near, 0].max())),
        int(steps[0]),
        int(steps[-1]),
        len(steps),
        float(1.4826 * np.median(np.abs(values - law))),
    )


def _bin_medians(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The medians of step and value of each bin that is not empty."""
    edges = np.geomspace(steps[0], steps[-1] + 1, BINS + 1)
    at = np.unique(np.searchsorted(steps, edges))
    parts = [slice(a, b) for a, b in itertools.pairwise(at.tolist())]
    return np.array([np.median(steps[p]) for p in parts]), np.array(
        [np.median(values[p]) for p in parts]
    )


def _fit_linear(x: np.ndarray, y: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The least sum of absolute deviations of y from floor + scale x, with both >= 0, and (floor,
    scale).
    """
    weight = np.ones_like(y)
    floor = scale = 0.0
    for _ in range(12):
        total = weight.sum()
        mx = (weight * x).sum()
        my = (weight * y).sum()
        mx = mx / total
        my = my / total
        spread = (weight * (x - mx) ** 2).sum()
        scale = max(0.0, (weight * (x - mx) * (y - my)).sum() / spread) if spread > 1e-18 else 0.0
        floor = my - scale * mx
        if floor < 0:
            floor = 0.0
            scale = max(0.0, (weight * x * y).sum() / (weight * x * x).sum())
        deviation = np.abs(y - floor - scale * x)
        weight = 1 / np.maximum(deviation, 1e-3 * np.abs(y).mean() + 1e-12)
    return float(np.abs(y - floor - scale * x).sum()), (float(floor), float(scale))


def find_spikes(steps: np.ndarray, values: np.ndarray, law: PowerLaw) -> list[Spike]:
    """The spikes, neighbours as one, in the order of their steps."""
    rest = values - law(steps)
    level, deviation = _local(rest)
    deviation = np.maximum(deviation, FLOOR * np.abs(values - rest + level) + 1e-12)
    z = (rest - level) / deviation
    found = list[Spike]()
    for i in np.flatnonzero(z > THRESHOLD).tolist():
        before = values[max(0, i - 8) : i]
        inside = bool(found) and steps[i - 1] <= found[-1].last
        if not inside and (
            not len(before) or values[i] - np.median(before) < THRESHOLD / 2 * deviation[i]
        ):
            continue  # the loss has fallen to it: the power law does not fit the first steps
        step = int(steps[i])
        value = float(values[i])
        height = float(z[i])
        if inside:
            old = found.pop()
            peak = (step, value, height) if height > old.z else (old.peak, old.value, old.z)
            found.append(Spike(old.first, step, *peak))
        else:
            found.append(Spike(step, step, step, value, height))
    return found


def _local(rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The local median, and the local robust standard deviation, of each value."""
    size = min(LONGEST, max(SHORTEST, len(rest) // BLOCKS))
    edges = np.linspace(0, len(rest), max(2, len(rest) // size) + 1).astype(int)
    parts = [rest[a:b] for a, b in itertools.pairwise(edges)]
    middle = (edges[:-1] + edges[1:] - 1) / 2
    medians = np.array([np.median(part) for part in parts])
    level = np.interp(np.arange(len(rest)), middle, medians)
    for half, at, other in (
        (slice(0, int(middle[0])), 0, 1),
        (slice(int(middle[-1]) + 1, None), -1, -2),
    ):
        # Goes on beyond the middle of a block
        slope = (medians[at] - medians[other]) / (middle[at] - middle[other])
        level[half] = medians[at] + slope * (np.arange(len(rest))[half] - middle[at])
    off = np.abs(rest - level)
    deviations = np.array([1.4826 * np.median(off[a:b]) for a, b in itertools.pairwise(edges)])
    padded = np.pad(deviations, 2, mode="edge")  # a block of which a spike is half must not hide it
    deviations = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return level, np.interp(np.arange(len(rest)), middle, deviations)


def find_plateaus(steps: np.ndarray, values: np.ndarray) -> tuple[list[Plateau], bool]:
    """The plateaus, overlapping ones as one, in the order of their steps; and whether noise could
    not hide them all.
    """
    begin = int(steps[0])
    length = int(steps[-1] - steps[0])
    judged = False
    flat = list[tuple[int, int]]()
    for start in np.arange(EARLIEST, 1 - WINDOW + 1e-9, STRIDE).tolist():
        first = begin + int(start * length)
        last = begin + int((start + WINDOW) * length)
        joined = bool(flat) and first <= flat[-1][1]
        # a plateau must not be part of the trend that it departs from
        until = flat[-1][0] if joined else first
        plateau = _measure(steps, values, first, last, until)
        judged |= plateau is not None
        if plateau and plateau.fall < min(2 * plateau.error, plateau.expected / 4):
            flat[len(flat) - joined :] = [(until, last)]
    measured = (_measure(steps, values, first, last, first) for first, last in flat)
    return [plateau for plateau in measured if plateau], judged


def _measure(
    steps: np.ndarray, values: np.ndarray, first: int, last: int, until: int
) -> Plateau | None:
    """The fall between two steps, and what the power law of the steps before `until` predicts.

    None if the noise could hide a fall of this size, or there are few values.
    """
    inside = (steps >= first) & (steps <= last)
    before = steps < until
    if inside.sum() < FEWEST // 2 or before.sum() < FEWEST // 2:
        return None
    law = fit_power_law(steps[before], values[before])
    s = steps[inside]
    v = values[inside]
    quarter = len(s) // 4
    start = slice(0, quarter)
    end = slice(len(s) - quarter, None)
    expected = float(np.median(law(s[start])) - np.median(law(s[end])))
    rest = v - np.polyval(np.polyfit(s - s[0], v, 1), s - s[0])
    noise = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    error = 1.2533 * noise * (2 / quarter) ** 0.5  # of a difference of two medians
    if expected <= 6 * error or expected <= FLOOR * abs(float(np.median(v))):
        return None
    fall = float(np.median(v[start]) - np.median(v[end]))
    return Plateau(int(s[0]), int(s[-1]), fall, error, expected)
