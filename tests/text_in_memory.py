"""Documents in memory, in place of the shards of a prepared folder."""

from __future__ import annotations

import numpy as np


class Documents:
    """One text: token ids first, first + 1, ... through documents of the given lengths.

    `masked`: no targets there.
    """

    def __init__(self, lengths: list[int], first: int = 0, masked: list[int] | None = None) -> None:
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.first, self.masked, self.documents = first, masked, len(lengths)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= len(self)
        return self.first + np.arange(start, start + count)

    def targets(self, start: int, count: int) -> np.ndarray | None:
        return (
            None if self.masked is None else ~np.isin(np.arange(start, start + count), self.masked)
        )

    def document_starts(self, start: int, end: int) -> np.ndarray:
        starts = self.starts[:-1]
        return starts[(starts >= start) & (starts < end)]
