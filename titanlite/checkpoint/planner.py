"""Planners for torch.distributed.checkpoint (DCP): plans from placements, with a small exchange.

    planner = PlacementSavePlanner()  # kept for the run: later saves use the first one's plan
    dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=group)
    dcp.load(state_dict, storage_reader=reader, planner=PlacementLoadPlanner(), process_group=group)

What it is: a DTensor's placements say which part of the tensor each rank holds, so a rank can
decide alone what it writes. Where a tensor is replicated, the replicas take turns, so that each
writes about as many bytes. Rank 0 needs the parts of all ranks only for the metadata. A large model
is cut in about twenty ways, so a rank sends its part of each *cut* that it writes, and every n-th
name, if n ranks hold the same tensors. In later saves it sends nothing, unless its tensors have
changed. A load first compares names, shapes and dtypes, and reports everything that does not fit,
including parts that are missing.
Why it is here: DCP's default planner sends the whole plan of each rank to rank 0, which merges and
checks it and sends it back. For a model of 405B parameters on 1,024 ranks that is half a gigabyte
of pickles and minutes of Python (benchmarks/many_ranks.py).
What it costs: in the first save less than 1 kB from each rank to rank 0, in the others nothing. DCP
itself sends the metadata from rank 0 to all ranks at the end of each save: 1 MB for that model.

It serves any `dcp.save` and `dcp.load`, with any storage: nothing else of titanlite is imported.
Conditions: all values are tensors, because a storage would have to pickle anything else; plain
tensors are equal on all ranks; the process group has all ranks of the meshes, and is the same in
all saves of a planner; ranks that hold the same tensors share a mesh. A planner keeps the tensors
of the last save until the next one, or until `release`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

Shape = tuple[int, ...]
MAX_PROBLEMS = 6  # lines of an error


class StateMismatch(ValueError):
    """A state that cannot be saved, or does not fit the checkpoint.

    `problems` has a line for each of the first MAX_PROBLEMS, because rank 0 receives all ranks'.
    """

    def __init__(self, problems: list[str]) -> None:
        if len(problems) > MAX_PROBLEMS:
            others = len(problems) - MAX_PROBLEMS + 1
            problems = [*problems[: MAX_PROBLEMS - 1], f"and {others} more like these"]
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(self.problems)


class Entry(NamedTuple):
    """A tensor's row in a rank's table. Ranks that hold the same tensors have equal tables."""

    path: tuple[str | int, ...]  # keys in the nested state dict; joined by dots: the name
    dtype: torch.dtype
    shape: Shape
    cut: int


class Report(NamedTuple):
    """The message of a rank to rank 0."""

    first: int  # the lowest rank that holds the same tensors
    digest: str  # hash of the table
    num_entries: int
    entries: dict[int, Entry]  # row number -> some rows of the table
    chunks: list[tuple[int, Shape, Shape]]  # (cut, offsets, sizes) that this rank writes


class Excluded(NamedTuple):
    """Rank 0's answer: what a rank leaves out, because another one writes it."""

    names: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()


def grid_edges(shape: Sequence[int], boxes: Sequence[tuple[Shape, Shape]]) -> tuple[Shape, ...]:
    """Computes the edges of the grid whose cells are these boxes (offsets, sizes): for each
    dimension the starts of the cells, then the length.

    Raises ValueError unless the boxes cover the shape without overlap. It sorts them instead of
    hashing: numbers from a hostile file may be chosen so that all their hashes collide.
    """
    dims = {len(shape)}
    for offsets, sizes in boxes:
        dims.update((len(offsets), len(sizes)))
    if len(dims) > 1:
        raise ValueError("a part has another number of dimensions than the tensor")

    edges: list[Shape] = []
    for dim, length in enumerate(shape):
        ordered = sorted([0, length, *(offsets[dim] for offsets, _ in boxes)])
        edges.append(tuple(edge for edge, _ in itertools.groupby(ordered)))

    # Compare counts first: the edges of hostile boxes can span a huge grid
    num_cells = math.prod(len(starts) - 1 for starts in edges)
    inside = all(
        starts[0] == 0 and starts[-1] == length for starts, length in zip(edges, shape, strict=True)
    )
    fits = inside and num_cells == len(boxes) and list(cells(edges)) == sorted(boxes)
    if not fits:
        raise ValueError(f"its {len(boxes)} parts do not make up its shape")
    return tuple(edges)


def cells(edges: Sequence[Shape]) -> Iterator[tuple[Shape, Shape]]:
    """Yields offsets and sizes of the cells of a grid, row by row."""
    for sides in itertools.product(*(itertools.pairwise(starts) for starts in edges)):
        yield tuple(start for start, _ in sides), tuple(end - start for start, end in sides)


class Part(NamedTuple):
    """This rank's part of a tensor `value`: the data `local`, at the place `chunk`."""

    name: str
    value: Tensor
    chunk: ChunkStorageMetadata
    local: Tensor

    @property
    def signature(self) -> Hashable:
        """The properties on which the plan of a tensor depends."""
        spread: tuple[Hashable, ...] = ()
        if isinstance(self.value, DTensor):
            spread = (self.value.device_mesh, self.value.placements)
        return (self.name, self.value.dtype, self.value.shape, *spread)


class LocalParts:
    """Finds the parts of tensors that this rank holds.

    A part's place is computed once for each shape, mesh and placements: that takes 14 ms for a
    strided shard on 1,024 ranks.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, ChunkStorageMetadata] = {}

    @torch.no_grad()  # with gradients, `DTensor.to_local` takes a call of Python for autograd
    def of(self, state: dict[str, Any]) -> list[Part]:
        """Returns the parts of all tensors; the mesh of a DTensor may lack this rank.

        Raises StateMismatch with everything that is not a tensor, or contradicts its placements.
        """
        parts = []
        problems = []
        for name, value in state.items():
            if not is_supported(value):
                kind = type(value).__name__
                problems.append(f"{name}: is of type {kind}; expected plain tensors and DTensors")
                continue
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            local = value.detach()
            if isinstance(value, DTensor):
                if value.device_mesh.get_coordinate() is None:
                    continue
                chunk = self._chunk(value)
                local = value.to_local()
            if local.shape != chunk.sizes:
                by_placements = f"by its placements {tuple(chunk.sizes)}"
                problems.append(f"{name}: holds {tuple(local.shape)}, and {by_placements}")
            parts.append(Part(name, value, chunk, local))
        if problems:
            raise StateMismatch(problems)
        return parts

    def _chunk(self, value: DTensor) -> ChunkStorageMetadata:
        key = (value.shape, value.device_mesh, value.placements)
        if key not in self._known:
            # DCP's own way to get it: one chunk per rank. Checked: torch 2.13; read: 2.11
            [self._known[key]] = value.__create_chunk_list__()
        return self._known[key]


def is_supported(value: object) -> bool:
    """Whether a value is a DTensor or a plain tensor; other sharded kinds are not supported."""
    is_sharded = hasattr(value, "__create_write_items__") or hasattr(value, "local_shards")
    return isinstance(value, DTensor) or (isinstance(value, Tensor) and not is_sharded)


def replicas(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, int]:
    """Returns which replica of a tensor this rank holds, and the number of replicas."""
    replica = 0
    count = 1
    coordinates = mesh.get_coordinate() or ()
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + coordinates[axis]
            count *= mesh.size(axis)
    return replica, count


def write_item(part: Part) -> WriteItem:
    """Builds DCP's description of a part that is written."""
    kind = WriteItemType.TENSOR
    if isinstance(part.value, DTensor):
        kind = WriteItemType.SHARD
    properties = TensorProperties(part.value.dtype)
    data = TensorWriteData(part.chunk, properties, part.value.shape)
    return WriteItem(MetadataIndex(part.name, part.chunk.offsets), kind, tensor_data=data)


class PlacementSavePlanner(DefaultSavePlanner):
    """Plans saves: one object for all saves of a run.

    On rank 0, `writers` maps the name of each tensor to the ranks that write its chunks, in the
    order of the metadata's chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writers: dict[str, list[int]] = {}
        self._local_parts = LocalParts()
        self._parts: list[Part] = []
        self._locals: dict[str, Tensor] = {}  # tensors that this rank writes
        self._signature: list[Hashable] = []  # describes the tensors that the plan is for
        self._items: list[tuple[int, WriteItem]] = []  # (cut, item) that this rank writes
        self._report = Report(0, "", 0, {}, [])
        self._reported = False  # whether rank 0 has used the report
        # On rank 0: what all ranks have reported, and the answers
        self._reports: list[Report] = []
        self._answers: list[Excluded] = []

    def create_local_plan(self) -> SavePlan:
        """Returns a plan without items, whose `planner_data` is the report to rank 0.

        Raises StateMismatch.
        """
        self._parts = self._local_parts.of(self.state_dict)
        signature = [part.signature for part in self._parts]
        if signature != self._signature:
            self._plan()
            self._signature = signature
            self._reported = False
        return SavePlan([], planner_data=None if self._reported else self._report)

    def _plan(self) -> None:
        """Decides what this rank writes, and what it reports."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        holders = [rank]  # the ranks that hold the same tensors
        meshes = {part.value.device_mesh for part in self._parts if isinstance(part.value, DTensor)}
        if meshes:
            largest = max(meshes, key=DeviceMesh.size)
            holders = sorted(largest.mesh.flatten().tolist())
        table: list[Entry] = []
        self._items = []
        # Cuts are numbered in the order of the tensors, so all holders use the same numbers
        cuts: dict[Hashable, int] = {}
        written: dict[int, list[int]] = {}  # number of replicas -> bytes per replica
        for part in self._parts:
            value = part.value
            if isinstance(value, DTensor):
                replica, count = replicas(value.device_mesh, value.placements)
                # The replica with the fewest bytes so far writes this tensor
                bytes_of = written.setdefault(count, [0] * count)
                writer = bytes_of.index(min(bytes_of))
                bytes_of[writer] += value.numel() * value.element_size()
                writes = writer == replica
                # The writer is part of the key, because each part is reported by its writer
                key: Hashable = (value.shape, value.device_mesh, value.placements, writer)
            else:
                writes = rank == holders[0]
                key = value.shape
            cut = cuts.setdefault(key, len(cuts))
            table.append(Entry(self.mappings[part.name], value.dtype, tuple(value.shape), cut))
            if writes and 0 not in part.chunk.sizes:  # uneven shards can be empty
                self._items.append((cut, write_item(part)))
        chunks = {}  # cut -> chunk, which all tensors of a cut share
        for cut, item in self._items:
            assert item.tensor_data is not None
            chunks[cut] = item.tensor_data.chunk
        own = range(holders.index(rank), len(table), len(holders))  # the holders share the table
        self._report = Report(
            holders[0],
            hashlib.sha256(repr(table).encode()).hexdigest(),
            len(table),
            {place: table[place] for place in own},
            [(cut, tuple(chunk.offsets), tuple(chunk.sizes)) for cut, chunk in chunks.items()],
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Runs on rank 0: returns for each rank a plan with what it leaves out, and the metadata.

        Raises StateMismatch if the parts of a tensor do not cover it, or overlap: such a checkpoint
        could not be loaded.
        """
        sent: list[Report | None] = [plan.planner_data for plan in all_plans]
        if any(report is not None for report in sent):
            reports = []
            for rank, report in enumerate(sent):
                if report is None and not self._reports:
                    raise StateMismatch(
                        [f"rank {rank} has a planner of earlier saves, and rank 0 a new one"]
                    )
                reports.append(self._reports[rank] if report is None else report)
            self.metadata, self.writers, self._answers = combined(reports)
            self._reports = reports
        plans = [SavePlan([], planner_data=answer) for answer in self._answers]
        return plans, dataclasses.replace(self.metadata)  # a storage adds its own data

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan of what this rank writes."""
        self._reported = True
        self._locals = {part.name: part.local for part in self._parts}
        excluded: Excluded = new_plan.planner_data
        items = []
        for cut, item in self._items:
            if cut not in excluded.cuts and item.index.fqn not in excluded.names:
                items.append(item)
        return dataclasses.replace(new_plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Returns this rank's part of a tensor."""
        return self._locals[index.fqn]

    def release(self) -> None:
        """Drops the tensors of the last save, but not its plan: a caller may want to free them."""
        self.state_dict = {}
        self._parts = []
        self._locals = {}


class Cut(NamedTuple):
    """The chunks of all tensors that are cut alike, and the rank that writes each."""

    chunks: list[ChunkStorageMetadata]
    writers: list[int]


def combined(
    reports: list[Report],
) -> tuple[Metadata, dict[str, list[int]], list[Excluded]]:
    """Combines the reports of all ranks into the metadata, the writers of each tensor's chunks, and
    what each rank leaves out. Raises StateMismatch.
    """
    cuts, doubled = reported_cuts(reports)
    covered: dict[tuple[int, int], tuple[int, ...]] = {}  # cut -> the last shape compared with it
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    writers: dict[str, list[int]] = {}
    dtypes: dict[torch.dtype, TensorProperties] = {}
    shared: dict[int, list[str]] = {}  # first rank -> tensors that earlier holders write
    for first, table in sorted(reported_tables(reports).items()):
        shared[first] = []
        for _, entry in sorted(table.items()):
            name = ".".join(map(str, entry.path))
            shape = torch.Size(entry.shape)
            if name in tensors:  # a tied embedding, a plain tensor
                other = tensors[name]
                assert isinstance(other, TensorStorageMetadata)
                if (other.properties.dtype, other.size) != (entry.dtype, shape):
                    kinds = described(other.properties.dtype, other.size)
                    raise StateMismatch(
                        [f"{name} is {kinds}, and on rank {first} {described(entry.dtype, shape)}"]
                    )
                shared[first].append(name)
                continue
            key = (first, entry.cut)
            cut = cuts.get(key, Cut([], []))
            if covered.get(key) != entry.shape:
                boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in cut.chunks]
                try:
                    grid_edges(entry.shape, boxes)
                except ValueError as error:
                    raise StateMismatch([f"{name} of shape {list(shape)}: {error}"]) from None
                covered[key] = entry.shape
            properties = dtypes.setdefault(entry.dtype, TensorProperties(entry.dtype))
            tensors[name] = TensorStorageMetadata(properties, shape, cut.chunks)
            paths[name] = entry.path
            writers[name] = cut.writers
    answers = []
    for rank, report in enumerate(reports):
        answers.append(Excluded(tuple(shared[report.first]), tuple(doubled[rank])))
    return Metadata(tensors, planner_data=paths), writers, answers


def reported_tables(reports: list[Report]) -> dict[int, dict[int, Entry]]:
    """Joins the reported parts of each table: first rank -> table. Raises StateMismatch."""
    tables: dict[int, dict[int, Entry]] = {}
    compared: dict[int, int] = {}  # first rank -> the report to compare others with
    for rank, report in enumerate(reports):
        tables.setdefault(report.first, {}).update(report.entries)
        other = compared.setdefault(report.first, rank)
        if report.digest != reports[other].digest:
            raise StateMismatch([f"ranks {other} and {rank} hold other tensors on the same mesh"])
    for first, table in tables.items():
        if len(table) != reports[compared[first]].num_entries:
            raise StateMismatch([f"not all ranks of the mesh of rank {first} take part"])
    return tables


def reported_cuts(reports: list[Report]) -> tuple[dict[tuple[int, int], Cut], list[list[int]]]:
    """Returns the cuts by (first rank, number), and for each rank the numbers of cuts whose part a
    lower rank writes: a tensor can lie on a part of the mesh, and other ranks then have a copy.
    """
    cuts: dict[tuple[int, int], Cut] = {}
    doubled: list[list[int]] = [[] for _ in reports]
    known: set[tuple[int, int, Shape]] = set()
    for rank, report in enumerate(reports):
        for number, offsets, sizes in report.chunks:
            place = (report.first, number, offsets)
            if place in known:
                doubled[rank].append(number)
                continue
            known.add(place)
            cut = cuts.setdefault((report.first, number), Cut([], []))
            cut.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            cut.writers.append(rank)
    return cuts, doubled


class PlacementLoadPlanner(DefaultLoadPlanner):
    """Plans a load, and compares everything before anything is read.

    A floating-point tensor may be saved in another precision: it is converted. DCP's own planner
    converts any dtype to any other without a message.
    """

    def create_local_plan(self) -> LoadPlan:
        """Returns a plan without items for rank 0; `finish_plan` returns the items.

        Raises StateMismatch with everything that is absent or does not fit.
        """
        assert self.metadata is not None
        self._items: list[ReadItem] = []
        self._locals: dict[str, Tensor] = {}
        known: dict[Hashable, list[Overlap]] = {}  # many tensors share a list of chunks
        problems = []
        for part in LocalParts().of(self.state_dict):
            saved = self.metadata.state_dict_metadata.get(part.name)
            if saved is None and self.allow_partial_load:
                continue
            problem = difference(part, saved)
            if problem:
                problems.append(problem)
                continue
            assert isinstance(saved, TensorStorageMetadata)
            key = (id(saved.chunks), part.chunk.offsets, part.chunk.sizes)
            if key not in known:
                known[key] = list(overlapping(saved.chunks, part.chunk))
            overlaps = known[key]
            found = sum(overlap.lengths.numel() for overlap in overlaps)
            needed = part.chunk.sizes.numel()
            if found != needed:
                place = f"{list(part.chunk.sizes)} at {list(part.chunk.offsets)}"
                problems.append(
                    f"{part.name}: its saved parts have {found} of the {needed} numbers of this "
                    f"rank's {place}"
                )
                continue
            self._locals[part.name] = part.local
            self._items += [read_item(part, overlap) for overlap in overlaps]
        if problems:
            raise StateMismatch(problems)
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Returns the plan of what this rank reads."""
        return dataclasses.replace(new_plan, items=self._items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns this rank's part of a tensor."""
        return self._locals[index.fqn]


def read_item(part: Part, overlap: Overlap) -> ReadItem:
    """Builds DCP's description of what is read from a chunk."""
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(part.name, part.chunk.offsets),
        overlap.in_part,
        MetadataIndex(part.name, overlap.chunk.offsets, overlap.number),
        overlap.in_chunk,
        overlap.lengths,
    )


def difference(part: Part, saved: object) -> str:
    """Describes what is wrong with a tensor of the checkpoint; "" if nothing is."""
    if saved is None:
        return f"has no {part.name}"
    if not isinstance(saved, TensorStorageMetadata):
        return f"{part.name} is not a tensor"
    saved_dtype = saved.properties.dtype
    both_float = saved_dtype.is_floating_point and part.value.is_floating_point()
    if saved.size == part.value.shape and (both_float or saved_dtype == part.value.dtype):
        return ""
    found = described(saved_dtype, saved.size)
    return f"{part.name} is {found}; expected {described(part.value.dtype, part.value.shape)}"


def described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


class Overlap(NamedTuple):
    """The intersection of a saved chunk and a part of a tensor."""

    chunk: ChunkStorageMetadata
    number: int  # the chunk's index in the tensor's list
    in_chunk: torch.Size  # offsets of the intersection
    in_part: torch.Size
    lengths: torch.Size


def overlapping(
    chunks: Sequence[ChunkStorageMetadata], part: ChunkStorageMetadata
) -> Iterator[Overlap]:
    """Lists the intersections of the chunks with a part of the tensor."""
    for number, chunk in enumerate(chunks):
        in_chunk = []
        in_part = []
        lengths = []
        for chunk_start, chunk_size, start, size in zip(
            chunk.offsets, chunk.sizes, part.offsets, part.sizes, strict=True
        ):
            first = max(chunk_start, start)
            in_chunk.append(first - chunk_start)
            in_part.append(first - start)
            lengths.append(min(chunk_start + chunk_size, start + size) - first)
        if all(length > 0 for length in lengths):
            sizes = torch.Size(lengths)
            yield Overlap(chunk, number, torch.Size(in_chunk), torch.Size(in_part), sizes)
