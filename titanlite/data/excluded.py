"""Samples that the stream leaves out, since a run has rolled back from a step with them.

What it is: the order of the samples without some ranges of sample numbers. Position p of the stream
is the p-th sample that is not excluded, so the state of the data stays one integer, and positions
before a range are what they were before it was excluded. That holds for any batch size.
Phases of a mixture begin at a sample number, so at a position that is lower by the number of
samples excluded before. The same rows return in the next epoch of their source, where they have
other sample numbers.
What it costs: a comparison per range and sample.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]  # first sample number, and the one after the last


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """The same sample numbers as ascending, disjoint ranges; those given may overlap."""
    merged: list[Range] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            previous_first, previous_end = merged[-1]
            merged[-1] = (previous_first, max(end, previous_end))
        else:
            merged.append((first, end))
    return merged


def sample_number(position: int, excluded: Sequence[Range]) -> int:
    """The sample number at a position of the stream; `excluded` is ascending and disjoint."""
    number = position
    for first, end in excluded:
        if number < first:
            break
        number += end - first
    return number
