"""Describes how a tensor is cut into boxes, and which file holds each of them.

What it is: FSDP and tensor parallel cut a tensor along its dimensions, so the parts of it are the
cells of a grid. A grid is given by its edges in each dimension and the file of each cell, row by
row. A tensor of shape (8, 6), written by four ranks:

    edges (0, 4, 8) and (0, 3, 6)      0     3     6
                                     0 +-----+-----+
                                       |  0  |  1  |      a cell: the file of rank 0, of rank 1, ...
                                     4 +-----+-----+
                                       |  2  |  3  |
                                     8 +-----+-----+

Most tensors of a model are cut in one of a few ways, so a checkpoint has few grids, and the
manifest names the grid of each tensor.
What it costs: for 1,024 ranks a grid has 1,024 edges and file names. A list of all parts of Llama 3
405B and its moments would have 2.8 million entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from titanlite.checkpoint.planner import cells, grid_edges

MAX_DIMS = 64  # torch's own limit


class Box(NamedTuple):
    """A part of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Grid(NamedTuple):
    """A tensor's cells. `edges`: for each dimension the starts of the cells, then the length;
    `files`: the file of each cell, row by row.
    """

    edges: tuple[tuple[int, ...], ...]
    files: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(edges[-1] for edges in self.edges)

    def boxes(self) -> Iterator[Box]:
        """Yields all cells, row by row."""
        for file, (offsets, sizes) in zip(self.files, cells(self.edges), strict=True):
            yield Box(file, offsets, sizes)


def grid_of(shape: Sequence[int], boxes: Iterable[Box]) -> Grid:
    """Builds the grid whose cells are these boxes; empty boxes are left out.

    Raises ValueError unless the boxes cover the shape without overlap.
    """
    parts = [box for box in boxes if 0 not in box.sizes]
    if len(shape) > MAX_DIMS:
        raise ValueError("a tensor of too many dimensions")
    edges = grid_edges(shape, [(box.offsets, box.sizes) for box in parts])
    parts.sort(key=lambda box: box.offsets)
    return Grid(edges, tuple(box.file for box in parts))
