"""How a tensor is cut into boxes, and which file holds each of them.

What it is: FSDP and tensor parallel cut a tensor along its dimensions, so the parts that ranks hold
are the cells of a grid: its edges in each dimension, and the file of each cell. Most tensors of a
model are cut in one of a few ways, so a checkpoint has few grids, and the manifest names the grid
of each tensor.
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
            number = 0
            box = []
            for i, edges in zip(place, self.edges, strict=True):
                number = number * (len(edges) - 1) + i
                box.append((edges[i], edges[i + 1] - edges[i]))
            yield Box(
                self.files[number], tuple(start for start, _ in box), tuple(size for _, size in box)
            )

    def boxes(self) -> Iterator[Box]:
        """All cells."""
        return self.overlapping([0] * len(self.edges), self.shape)


def grid_of(shape: Sequence[int], boxes: Iterable[Box]) -> Grid:
    """The grid whose cells are these boxes. Raises ValueError unless they cover the shape, without
    overlap.

    Empty boxes are left out: uneven shards can be empty. Numbers from a file may be chosen so that
    all their hashes collide, so they are sorted instead.
    """
    boxes = sorted((box for box in boxes if 0 not in box.sizes), key=lambda box: box.offsets)
    if len(shape) > MAX_DIMS or any(
        len(numbers) != len(shape) for box in boxes for numbers in box[1:]
    ):
        raise ValueError("a part has another number of dimensions than the tensor, or too many")
    edges = []
    for dim, length in enumerate(shape):
        ordered = sorted([0, length, *(box.offsets[dim] for box in boxes)])
        edges.append(tuple(edge for edge, _ in itertools.groupby(ordered)))
    grid = Grid(tuple(edges), tuple(box.file for box in boxes))
    cells = math.prod(len(edges) - 1 for edges in grid.edges)
    inside = all(
        edges[0] == 0 and edges[-1] == length
        for edges, length in zip(grid.edges, shape, strict=True)
    )
    if (
        not inside
        or cells != len(boxes)
        or any(a != b for a, b in zip(grid.boxes(), boxes, strict=True))
    ):
        raise ValueError(f"its {len(boxes)} parts do not make up its shape")
    return grid
