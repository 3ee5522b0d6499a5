"""Thins the points of a plot and keeps the extremes.

What it is: points are divided into buckets of equal number, and each bucket keeps its smallest and
its largest value with their steps. So a spike of one step in a million stays in the picture; an
average or every n-th point would hide it. Smoothed curves are made from the means of the buckets.
"""

from __future__ import annotations

import itertools

import numpy as np


def extremes(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps at most `most` points: the first, the last, and the extremes of each bucket."""
    if len(x) <= most:
        return x, y
    indices = [0, len(x) - 1]
    for bucket in _buckets(len(x), (most - 2) // 2):
        values = y[bucket]
        indices.append(bucket.start + int(values.argmin()))
        indices.append(bucket.start + int(values.argmax()))
    chosen = np.unique(indices)  # in order, each once
    return x[chosen], y[chosen]


def means(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean place and the mean value of at most `most` buckets."""
    if len(x) <= most:
        return x, y
    buckets = _buckets(len(x), most)
    mean_x = np.array([x[bucket].mean() for bucket in buckets])
    mean_y = np.array([y[bucket].mean() for bucket in buckets])
    return mean_x, mean_y


def evenly(count: int, most: int) -> np.ndarray:
    """Chooses at most `most` of `count` indices, evenly spaced from the first to the last."""
    indices = np.linspace(0, max(0, count - 1), min(count, most)).astype(int)
    return np.unique(indices)


def _buckets(count: int, number: int) -> list[slice]:
    edges = np.linspace(0, count, max(1, number) + 1).astype(int)
    return [slice(a, b) for a, b in itertools.pairwise(edges.tolist()) if b > a]


def numbers(values: np.ndarray, digits: int = 5) -> list[float]:
    """The values rounded to `digits` for JSON, whole numbers without a fraction."""
    result: list[float] = []
    for value in values.tolist():
        rounded = float(f"{value:.{digits}g}")
        is_whole = rounded == int(rounded) and abs(rounded) < 1e15
        result.append(int(rounded) if is_whole else rounded)
    return result
