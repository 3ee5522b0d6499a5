"""The trend of a loss, and what departs from it: spikes and plateaus.

What it is: the trend is a power law, L(s) = E + A s^-b with E, A, b >= 0, where s is the step: E is
the loss that the run approaches, b how fast. It is fitted to the medians of BINS bins of equal
width in log(s), so that the many late steps do not outweigh the early ones and spikes do not count.
For each b of a grid, E and A minimise the sum of absolute deviations (least squares, reweighted);
the b with the smallest sum is taken.
Why it is here: a loss falls all the time, so a fixed threshold takes the first steps for a spike,
and a flat stretch near the end, where little is left to fall, for a plateau. Both are judged after
the trend has been removed:

    spike      a value that is THRESHOLD robust standard deviations above the local median of what
               is left, and far above the steps just before it. The deviation is 1.4826 MAD, as in
               `optim/stability.py`.
    plateau    a quarter of the run in which the loss has not fallen, though the power law of the
               steps before it predicts a fall larger than the noise.

With fewer than FEWEST logged steps after the warmup neither can be decided, and nothing is
returned.
What it costs: 0.4 s for 10,000 steps, most of it for plateaus; 2.5 s for a million.
Reference: Hestness et al. 2017 (arXiv 1712.00409); here over the steps of one run, which a schedule
may bend.
"""

from __future__ import annotations

import dataclasses
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
    """What was found in a loss curve; `law` is None if there are too few steps, `why` says so."""

    law: PowerLaw | None
    spikes: list[Spike]
    plateaus: list[Plateau]
    # Whether there was a part in which a plateau could be distinguished from noise
    judged: bool = False
    why: str = ""


def trend(steps: np.ndarray, values: np.ndarray, warmup: int) -> Trend:
    """The trend of the loss, without the steps of the learning rate's warmup."""
    if len(steps) == 0:
        return Trend(None, [], [], why="no loss has been logged")
    begin = max(warmup, int(steps[-1]) // 20, 1)
    used = steps > begin
    s = steps[used]
    v = values[used]
    if len(s) < FEWEST:
        why = f"{len(s)} steps were logged after the warmup, and a fit needs {FEWEST}"
        return Trend(None, [], [], why=why)
    law = fit_power_law(s, v)
    plateaus, judged = find_plateaus(s, v)
    return Trend(law, find_spikes(s, v, law), plateaus, judged)


def fit_power_law(steps: np.ndarray, values: np.ndarray) -> PowerLaw:
    """The power law of at least a few positive steps, in ascending order."""
    s, v = _bin_medians(steps, values)
    unit = s[-1]  # steps in units of the last one: powers of large numbers would lose digits

    def fit_each(exponents: np.ndarray) -> tuple[list[float], list[tuple[float, float]]]:
        """For each exponent the sum of absolute deviations, and (floor, scale)."""
        fits = [_fit_linear((s / unit) ** -b, v) for b in exponents]
        return [deviation for deviation, _ in fits], [coefficients for _, coefficients in fits]

    # A coarse grid of exponents, then a fine one between the neighbours of the best
    coarse = np.geomspace(0.02, 3.0, 40)
    coarse_sums, coarse_fits = fit_each(coarse)
    best = int(np.argmin(coarse_sums))
    lower = coarse[max(best - 1, 0)]
    upper = coarse[min(best + 1, len(coarse) - 1)]
    fine = np.geomspace(lower, upper, 21)
    fine_sums, fine_fits = fit_each(fine)
    exponents = np.concatenate([coarse, fine])
    sums = np.array(coarse_sums + fine_sums)
    fits = np.array(coarse_fits + fine_fits)  # (61, 2)

    best = int(sums.argmin())
    b = float(exponents[best])
    floor, scale = fits[best]
    law = floor + scale * (steps / unit) ** -b
    plausible = sums <= 1.1 * sums[best] + 1e-12
    floors = fits[plausible, 0]
    return PowerLaw(
        floor=float(floor),
        scale=float(scale * unit**b),
        exponent=b,
        exponents=(float(exponents[plausible].min()), float(exponents[plausible].max())),
        floors=(float(floors.min()), float(floors.max())),
        first=int(steps[0]),
        last=int(steps[-1]),
        count=len(steps),
        noise=_robust_deviation(values - law),
    )


def _robust_deviation(differences: np.ndarray) -> float:
    """1.4826 times the median of the absolute values: of normal noise, its standard deviation."""
    return float(1.4826 * np.median(np.abs(differences)))


def _bin_medians(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The medians of step and value of each bin that is not empty."""
    edges = np.geomspace(steps[0], steps[-1] + 1, BINS + 1)
    borders = np.unique(np.searchsorted(steps, edges))  # equal ones enclose an empty bin
    bins = [slice(a, b) for a, b in itertools.pairwise(borders.tolist())]
    median_steps = np.array([np.median(steps[part]) for part in bins])
    median_values = np.array([np.median(values[part]) for part in bins])
    return median_steps, median_values


def _fit_linear(x: np.ndarray, y: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The least sum of absolute deviations of y from floor + scale x, and (floor, scale).

    Both are at least 0. Least squares, in which a point far away gets a smaller weight each time.
    """
    weight = np.ones_like(y)
    floor = 0.0
    scale = 0.0
    for _ in range(12):
        total = weight.sum()
        mean_x = (weight * x).sum() / total
        mean_y = (weight * y).sum() / total
        spread = (weight * (x - mean_x) ** 2).sum()
        scale = 0.0
        if spread > 1e-18:
            scale = max(0.0, (weight * (x - mean_x) * (y - mean_y)).sum() / spread)
        floor = mean_y - scale * mean_x
        if floor < 0:
            floor = 0.0
            scale = max(0.0, (weight * x * y).sum() / (weight * x * x).sum())
        deviation = np.abs(y - floor - scale * x)
        weight = 1 / np.maximum(deviation, 1e-3 * np.abs(y).mean() + 1e-12)
    return float(np.abs(y - floor - scale * x).sum()), (float(floor), float(scale))


def find_spikes(steps: np.ndarray, values: np.ndarray, law: PowerLaw) -> list[Spike]:
    """The spikes, neighbours as one, in the order of their steps."""
    residuals = values - law(steps)
    level, deviation = _local(residuals)
    smallest = FLOOR * np.abs(law(steps) + level) + 1e-12
    deviation = np.maximum(deviation, smallest)
    z = (residuals - level) / deviation
    spikes = list[Spike]()
    for i in np.flatnonzero(z > THRESHOLD).tolist():
        step = int(steps[i])
        value = float(values[i])
        height = float(z[i])
        if spikes and steps[i - 1] <= spikes[-1].last:  # goes on with the last spike
            spike = dataclasses.replace(spikes[-1], last=step)
            if height > spike.z:
                spike = dataclasses.replace(spike, peak=step, value=value, z=height)
            spikes[-1] = spike
            continue
        before = values[max(0, i - 8) : i]
        # Else the loss has fallen to it: the power law does not fit the first steps
        if len(before) and value - np.median(before) >= THRESHOLD / 2 * deviation[i]:
            spikes.append(Spike(step, step, step, value, height))
    return spikes


def _local(residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The local median, and the local robust standard deviation, of each value."""
    count = len(residuals)
    size = min(LONGEST, max(SHORTEST, count // BLOCKS))
    edges = np.linspace(0, count, max(2, count // size) + 1).astype(int)
    blocks = [slice(a, b) for a, b in itertools.pairwise(edges.tolist())]
    centers = (edges[:-1] + edges[1:] - 1) / 2
    places = np.arange(count)

    medians = np.array([np.median(residuals[block]) for block in blocks])
    level = np.interp(places, centers, medians)
    # Beyond the centers of the first and the last block it goes on as a straight line
    begin = slice(0, int(centers[0]))
    end = slice(int(centers[-1]) + 1, None)
    for part, outer, inner in ((begin, 0, 1), (end, -1, -2)):
        slope = (medians[outer] - medians[inner]) / (centers[outer] - centers[inner])
        level[part] = medians[outer] + slope * (places[part] - centers[outer])

    distances = residuals - level
    deviations = np.array([_robust_deviation(distances[block]) for block in blocks])
    # The median of five blocks: one of which a spike is half must not hide it
    padded = np.pad(deviations, 2, mode="edge")
    deviations = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return level, np.interp(places, centers, deviations)


def find_plateaus(steps: np.ndarray, values: np.ndarray) -> tuple[list[Plateau], bool]:
    """The plateaus, in the order of their steps, and whether there was a part to judge.

    Overlapping plateaus are one. A part cannot be judged if noise could hide a plateau in it.
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
            if joined:
                flat.pop()
            flat.append((until, last))
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
    line = np.polyfit(s - s[0], v, 1)
    residuals = v - np.polyval(line, s - s[0])
    noise = _robust_deviation(residuals - np.median(residuals))
    error = 1.2533 * noise * (2 / quarter) ** 0.5  # of a difference of two medians
    if expected <= 6 * error or expected <= FLOOR * abs(float(np.median(v))):
        return None
    fall = float(np.median(v[start]) - np.median(v[end]))
    return Plateau(int(s[0]), int(s[-1]), fall, error, expected)
