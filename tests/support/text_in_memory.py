"""Documents in memory, in place of the shards of a prepared folder, and samples of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from titanlite.data.mixture import Mixture
from titanlite.data.order import Samples
from titanlite.data.rows import Rows


class Ranks(NamedTuple):
    """The data-parallel ranks of a mesh, without processes."""

    data_rank: int = 0
    data_size: int = 1


def only_source(rows: Rows, seed: int = 0, name: str = "") -> Samples:
    """The samples of a run with a single source."""
    return Samples({name: rows}, seed, Mixture([(0, [1.0])]))


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
