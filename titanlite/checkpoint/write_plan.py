"""Which process writes which part of which tensor: decided by each from its tensors' placements.

What it is: the processes of a pipeline stage hold parts of the same tensors, as DTensors on one
mesh. Where a tensor is replicated, one of the replicas writes it; they take turns, so that each
writes about as many bytes. All processes of the stage know the placements, so all come to the same
result, and none asks another.
Why it is here: the planner of torch.distributed.checkpoint sends all plans to rank 0 as pickles,
compares them there and sends them back. For Llama 3 405B on 8 ranks that takes half a minute of
Python, most of it for a rank's own plan.
What it costs: rank 0 receives the table of each stage, and from every rank a box for each of about
20 layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.grid import Box, Grid, grid_of
from titanlite.checkpoint.manifest import DTYPE_NAMES, TensorEntry, part_key
from titanlite.checkpoint.state import State
from titanlite.distributed.torch_private import local_box


class Part(NamedTuple):
    """This process's part of a tensor: `local`, which begins at `offsets` and has `sizes`."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor


def local_parts(state: State) -> Iterator[tuple[Part, Any]]:
    """The parts of a state that this process holds, each with the whole value.

    Raises ValueError or TypeError.
    """
    for section, values in state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{section}.{key}: a checkpoint holds tensors only")
            shape = tuple(value.shape)
            local = value
            box = ((0,) * value.dim(), tuple(value.shape))
            if isinstance(value, DTensor):
                local = value.to_local()
                box = local_box(shape, value.device_mesh, value.placements)
            if tuple(local.shape) != box[1]:
                raise ValueError(
                    f"{section}.{key}: holds {tuple(local.shape)}, and by its placements {box[1]}"
                )
            yield Part(f"{section}.{key}", shape, *box, local.detach()), value


Table = dict[str, tuple[str, tuple[int, ...], int]]  # tensor -> dtype, shape, number of its layout


class Plan:
    """What this process writes.

    `table` has all tensors of its pipeline stage, and is the same on all processes of the stage.
    `parts` are those that this process writes. `first` is the lowest rank of the stage: that of the
    mesh on which its DTensors lie. A process without DTensors is a stage of its own.
    """

    def __init__(self, state: State) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.first = self.rank
        self.table: Table = {}
        self.parts: dict[str, Part] = {}
        # Layouts are numbered in the order of the tensors, so alike on all processes of the stage:
        # those of DTensors from 0 on, those of plain values, which `first` writes, from -1 down
        layouts: dict[tuple[Any, ...], int] = {}
        plain_layouts: dict[tuple[Any, ...], int] = {}
        plain_parts: dict[str, Part] = {}
        written: dict[int, list[int]] = {}  # number of replicas -> bytes that each of them writes
        for part, value in local_parts(state):
            if isinstance(value, DTensor):
                replica, count, lowest = _replicas(value.device_mesh, value.placements)
                self.first = min(self.first, lowest)
                # The replica that has written least is the next one
                bytes_of = written.setdefault(count, [0] * count)
                writer = bytes_of.index(min(bytes_of))
                bytes_of[writer] += math.prod(part.shape) * part.local.element_size()
                if writer == replica:
                    self.parts[part.name] = part
                # Also by replica, because a grid names the files of its cells
                layout = (_kind(part.name), part.shape, value.device_mesh, value.placements, writer)
                number = layouts.setdefault(layout, len(layouts))
            else:
                plain_parts[part.name] = part
                plain_layout = (_kind(part.name), part.shape)
                number = -1 - plain_layouts.setdefault(plain_layout, len(plain_layouts))
            self.table[part.name] = (DTYPE_NAMES[part.local.dtype], part.shape, number)
        if self.rank == self.first:  # plain values are equal on all processes of the stage
            self.parts.update(plain_parts)

    def files(self, shared: dict[str, int]) -> dict[str, dict[str, Tensor]]:
        """File name -> key -> tensor.

        `shared`: tensors of several stages -> `first` of the one that writes them.
        """
        files: dict[str, dict[str, Tensor]] = {}
        for name, part in self.parts.items():
            of_this_stage = shared.get(name, self.first) == self.first
            empty = 0 in part.sizes  # uneven shards can be
            if of_this_stage and not empty:
                key = part_key(name, part.shape, part.offsets, part.sizes)
                files.setdefault(self._file(name), {})[key] = part.local
        return files

    def boxes(self) -> list[tuple[int, int, Box]]:
        """`first`, layout and box, for each layout of which this process writes tensors."""
        boxes = {}
        for name, part in self.parts.items():
            _, _, layout = self.table[name]  # tensors of one layout have the same box
            boxes[layout] = Box(self._file(name), part.offsets, part.sizes)
        return [(self.first, layout, box) for layout, box in boxes.items()]

    def _file(self, name: str) -> str:
        return f"{_kind(name)}-{self.rank:05}.safetensors"


def _kind(name: str) -> str:
    """Which of the rank's files has the tensor.

    Parameters, and averaged ones (`optim/ema.py`), have separate files, because most readers need
    nothing else.
    """
    if name.startswith(("model.", "ema.")):
        return name.partition(".")[0]
    return "training"


@functools.cache
def _replicas(mesh: DeviceMesh, placements: tuple[Any, ...]) -> tuple[int, int, int]:
    """Which replica of a tensor this rank holds, how many there are, and the mesh's first rank."""
    replica = 0
    count = 1
    coordinates = mesh.get_coordinate() or ()
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + coordinates[axis]
            count *= mesh.size(axis)
    return replica, count, int(mesh.mesh.min())


def shared_tensors(tables: list[Table]) -> dict[str, int]:
    """The tensors that several stages hold, such as a tied embedding -> the first of these, which
    writes it.
    """
    holders: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for name in table:
            holders.setdefault(name, []).append(rank)
    return {name: ranks[0] for name, ranks in holders.items() if len(ranks) > 1}


def tensor_entries(tables: list[Table], boxes: list[list[Any]]) -> dict[str, TensorEntry]:
    """The manifest's entries, from the tables and boxes of all ranks.

    Raises ValueError if the parts of a tensor do not cover it, or overlap: such a checkpoint could
    not be loaded.
    """
    cells: dict[tuple[int, int], list[Box]] = {}  # of each stage's layouts, from all ranks
    for boxes_of_rank in boxes:
        for first, layout, (file, offsets, sizes) in boxes_of_rank:
            cell = Box(file, tuple(offsets), tuple(sizes))
            cells.setdefault((first, layout), []).append(cell)
    grids: dict[tuple[int, int], Grid] = {}
    entries: dict[str, TensorEntry] = {}
    for first, table in enumerate(tables):
        for name, (dtype, shape, layout) in table.items():
            if name in entries:  # a tensor of several stages
                continue
            if (first, layout) not in grids:
                try:
                    grids[first, layout] = grid_of(shape, cells.get((first, layout), []))
                except ValueError as error:
                    raise ValueError(f"{name} of shape {list(shape)}: {error}") from None
            entries[name] = TensorEntry(dtype, grids[first, layout])
    return entries
