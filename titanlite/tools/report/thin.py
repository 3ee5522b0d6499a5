"""Fewer points for a plot, in which the extremes remain.

What it is: points are divided into buckets of equal number; of each, the smallest and the largest
value stay, with their steps. So a spike of one step in a million is still in the picture, which an
average or every n-th point would hide. Smoothed curves are made from the means of the buckets
instead.
"""

from __future__ import annotations

import itertools

import numpy as np


def extremes(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points with the smallest and the largest value of each bucket, the first and
    the last point.
    """
    if len(x) <= most:
        return x, y
    kept = [0, len(x) - 1]
    for part in _buckets(len(x), (most - 2) // 2):
        values = y[part]
        kept += [part.start + int(values.argmin()), part.start + int(values.argmax())]
    chosen = np.unique(kept)
    return x[chosen], y[chosen]


def means(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean place and the mean value of at most `most` buckets."""
    if len(x) <= most:
        return x, y
    parts = _buckets(len(x), most)
    return np.array([x[part].mean() for part in parts]), np.array(
        [y[part].mean() for part in parts]
    )


def _buckets(count: int, number: int) -> list[slice]:
    edges = np.linspace(0, count, max(1, number) + 1).astype(int)
    return [slice(a, b) for a, b in itertools.pairwise(edges.tolist()) if b > a]


def numbers(values: np.ndarray, digits: int = 5) -> list[float]:
    """For JSON: what a plot can show of them, whole numbers without a fraction."""
    short = (float(f"{value:.{digits}g}") for value in values.tolist())
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in short]
