"""Samples that the stream skips because a run has rolled back from a step with them.

What it is: the order of the samples without some ranges of sample numbers. Position p of the stream
is the p-th sample that is not excluded, so the state of the data stays one integer, and positions
before a range are what they were before it was excluded. That holds for any batch size.
A mixture's phase begins at a sample number; its position in the stream is lower by the number of
samples excluded before. The same rows return in the next epoch of their source, with other sample
numbers.
What it costs: a comparison per range and sample.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]  # first sample number, and the one after the last


def as_ranges(pairs: Sequence[Sequence[int]]) -> list[Range]:
    """Restores ranges from JSON, in which a tuple is a list."""
    return [(first, end) for first, end in pairs]


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Merges ranges, which may overlap, into ascending and disjoint ones."""
    merged: list[Range] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            previous_first, previous_end = merged[-1]
            merged[-1] = (previous_first, max(end, previous_end))
        else:
            merged.append((first, end))
    return merged


def sample_number(position: int, excluded: Sequence[Range]) -> int:
    """Returns the sample number at a position; `excluded` is ascending and disjoint."""
    number = position
    for first, end in excluded:
        if number < first:
            break
        number += end - first
    return number
