"""How a tensor is cut into boxes, and which file holds each of them.

What it is: FSDP and tensor parallel cut a tensor along its dimensions, so the parts of it are the
cells of a grid. A grid is given by its edges in each dimension and the file of each cell, row by
row. A tensor of shape (8, 6), written by four ranks:

    edges (0, 4, 8) and (0, 3, 6)      0     3     6
                                     0 +-----+-----+
                                       |  0  |  1  |      a cell: the file of rank 0, of rank 1, ...
                                     4 +-----+-----+
                                       |  2  |  3  |
                                     8 +-----+-----+

A box is a part of a tensor, whether or not it is a cell: `overlapping` finds the cells that a
process in another layout has to read for its own part. Most tensors of a model are cut in one of a
few ways, so a checkpoint has few grids, and the manifest names the grid of each tensor.
What it costs: for 1,024 ranks a grid has 1,024 edges and file names. A list of all parts of Llama 3
405B and its moments would have 2.8 million entries.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MAX_DIMS = 64  # torch's own limit


class Box(NamedTuple):
    """A part of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Grid(NamedTuple):
    """`edges`: in each dimension the starts of the cells, then the length; `files`: of the cells,
    row by row.
    """

    edges: tuple[tuple[int, ...], ...]
    files: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(edges[-1] for edges in self.edges)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Box]:
        """The cells that overlap a box."""
        if 0 in sizes:
            return
        spans = [
            range(bisect_right(edges, offset) - 1, bisect_left(edges, offset + size))
            for edges, offset, size in zip(self.edges, offsets, sizes, strict=True)
        ]
        for place in itertools.product(*spans):
            number = 0  # of the cell, row by row
            starts = []
            lengths = []
            for i, edges in zip(place, self.edges, strict=True):
                number = number * (len(edges) - 1) + i
                starts.append(edges[i])
                lengths.append(edges[i + 1] - edges[i])
            yield Box(self.files[number], tuple(starts), tuple(lengths))

    def boxes(self) -> Iterator[Box]:
        """All cells."""
        return self.overlapping([0] * len(self.edges), self.shape)


def grid_of(shape: Sequence[int], boxes: Iterable[Box]) -> Grid:
    """The grid whose cells are these boxes. Raises ValueError unless they cover the shape, without
    overlap.

    Empty boxes are left out: uneven shards can be empty. Numbers from a file may be chosen so that
    all their hashes collide, so they are sorted instead.
    """
    cells = [box for box in boxes if 0 not in box.sizes]
    cells.sort(key=lambda box: box.offsets)
    dims = {len(shape)}
    for box in cells:
        dims.update((len(box.offsets), len(box.sizes)))
    if len(dims) > 1 or len(shape) > MAX_DIMS:
        raise ValueError("a part has another number of dimensions than the tensor, or too many")

    edges = []
    for dim, length in enumerate(shape):
        ordered = sorted([0, length, *(box.offsets[dim] for box in cells)])
        edges.append(tuple(edge for edge, _ in itertools.groupby(ordered)))
    grid = Grid(tuple(edges), tuple(box.file for box in cells))

    # As many cells as boxes, counted first: the edges of hostile boxes can make a huge grid
    num_cells = math.prod(len(edges) - 1 for edges in grid.edges)
    inside = all(
        edges[0] == 0 and edges[-1] == length
        for edges, length in zip(grid.edges, shape, strict=True)
    )
    if not inside or num_cells != len(cells) or list(grid.boxes()) != cells:
        raise ValueError(f"its {len(cells)} parts do not make up its shape")
    return grid
