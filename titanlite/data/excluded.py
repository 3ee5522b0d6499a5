"""Samples that the stream leaves out, since a run has rolled back from a step with them.

What it is: the order of the samples without some ranges of sample numbers. Position i of the stream
is the i-th sample that is not excluded, so the state of the data stays one integer, and positions
before a range are what they were before it was excluded. That holds for any batch size.
Phases of a mixture begin at a sample number, so at a position that is lower by the number of
samples excluded before. The same rows return in the next epoch of their source, where they have
other sample numbers.
What it costs: a comparison per range and sample.
"""

from __future__ import annotations

from titanlite.data.stream import Rows, Samples

Range = tuple[int, int]  # first sample number, and the one after the last


class RemainingSamples(Samples):
    """The samples of `order` without those in the ranges, which may overlap each other and those
    that it leaves out.
    """

    def __init__(self, order: Samples, ranges: list[Range]) -> None:
        super().__init__(dict(zip(order.names, order.rows, strict=True)), order.seed, order.mixture)
        self.ranges: list[Range] = []  # ascending and disjoint
        for first, end in sorted(
            [*ranges, *(order.ranges if isinstance(order, RemainingSamples) else [])]
        ):
            if self.ranges and first <= self.ranges[-1][1]:
                self.ranges[-1] = self.ranges[-1][0], max(end, self.ranges[-1][1])
            else:
                self.ranges.append((first, end))

    def number(self, position: int) -> int:
        """The sample number at a position of the stream."""
        for first, end in self.ranges:
            if position < first:
                break
            position += end - first
        return position

    def pick(self, sample: int) -> tuple[Rows, int]:
        return super().pick(self.number(sample))

    def epochs(self, samples: int) -> dict[str, float]:
        return super().epochs(self.number(samples))


def sample_number(order: Samples, position: int) -> int:
    """The sample number at a position of the stream, whether or not `order` leaves samples out."""
    return order.number(position) if isinstance(order, RemainingSamples) else position
