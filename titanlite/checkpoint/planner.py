"""Planners for torch.distributed.checkpoint (DCP): plans from placements, with a small exchange.

    planner = PlacementSavePlanner()  # kept for the run: later saves use the first one's plan
    dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=group)
    dcp.load(state_dict, storage_reader=reader, planner=PlacementLoadPlanner(), process_group=group)

What it is: a DTensor's placements say which part of the tensor each rank holds, so a rank can
decide alone what it writes. Where a tensor is replicated, the replicas take turns, so that each
writes about as many bytes. Rank 0 needs the parts of all ranks only for the metadata. A large model
is cut in about twenty ways, so a rank sends its part of each *cut* that it writes, and every n-th
name of the DTensors on a mesh of n ranks. Any other value, a plain tensor or one that DCP pickles,
is reported by each rank that has it, and the lowest of them writes it. In later saves a rank sends
nothing, unless its state has other names, shapes or placements. A load first compares names, shapes
and dtypes, and reports everything that does not fit, including parts that are missing.
Why it is here: DCP's default planner sends the whole plan of each rank to rank 0, which merges and
checks it and sends it back. For a model of 405B parameters on 1,024 ranks that is half a gigabyte
of pickles and minutes of Python (benchmarks/many_ranks.py).
What it costs: in the first save a few kB from each rank to rank 0, in the others nothing. DCP
itself sends the metadata from rank 0 to all ranks at the end of each save: 1 MB for that model.

It serves any `dcp.save` and `dcp.load`, with any storage: nothing else of titanlite is imported.
Conditions: a DTensor is in the state of all ranks of its mesh; plain values of one name are equal;
the process group has all ranks of the meshes, and is the same in all saves of a planner. A planner
keeps the tensors of the last save until the next one, or until `release`. A pickled planner is a
new one: it may go to another process that saves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import math
import pickle
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

Shape = tuple[int, ...]
Paths = dict[str, tuple[str | int, ...]]  # name -> keys in the nested state dict
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
    """A value of the state, as it is reported to rank 0."""

    path: tuple[str | int, ...]  # keys in the nested state dict; joined by dots: the name
    dtype: torch.dtype | None  # None: not a tensor
    shape: Shape = ()
    cut: int = 0  # of a DTensor


class Table(NamedTuple):
    """The message of a rank about the DTensors on one mesh, whose ranks have the same entries."""

    mesh: str  # hash of the mesh
    digest: str  # hash of the entries
    num_entries: int
    entries: dict[int, Entry]  # row number -> some rows of the table
    chunks: list[tuple[int, Shape, Shape]]  # (cut, offsets, sizes) that this rank writes


class Report(NamedTuple):
    """The message of a rank to rank 0. Its blocks are the tables, then the groups."""

    tables: list[Table]
    groups: list[bytes]  # `packed` entries of all other values, by their first key


# Rank 0's answer to a report: for each block `packed` flags, one for each entry, whether the rank
# writes it; b"" if it writes none
Answer = list[bytes]


def packed(values: Any) -> bytes:
    """Pickles a part of a message, and compresses it: names have much in common."""
    return zlib.compress(pickle.dumps(values))


def unpacked(message: bytes) -> Any:
    """Returns what `packed` has packed, on another rank of the same run."""
    return pickle.loads(zlib.decompress(message))


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

        Raises StateMismatch with every tensor of another sharded kind, or that contradicts its
        placements.
        """
        parts = []
        problems = []
        for name, value in state.items():
            local = value
            if isinstance(value, DTensor):
                if value.device_mesh.get_coordinate() is None:
                    continue
                local = value.to_local()
            if has_own_shards(local):
                kind = f"{type(local).__name__} with shards of its own"
                problems.append(f"{name}: is a {kind}; expected plain tensors and DTensors")
                continue
            if not isinstance(local, Tensor):
                continue
            local = local.detach()
            if isinstance(value, DTensor) and value.numel() == 0:
                # No part of it has elements: it is saved whole, as a plain tensor
                value = local.new_empty(value.shape)
                local = value
            chunk = whole_chunk(value.shape)
            if isinstance(value, DTensor):
                chunk = self._chunk(value)
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
            # DCP's own way to get it: one chunk per rank. Checked: torch 2.13; read: 2.11. Its name
            # is DCP's protocol for tensors that know their parts, so it is called here and not in
            # `torch_private.py`
            [self._known[key]] = value.__create_chunk_list__()
        return self._known[key]


def has_own_shards(value: object) -> bool:
    """Whether a value is sharded in another way than DTensors are: a ShardedTensor, a type with a
    plan of its own, and from torch 2.14 on a CheckpointableTensor, a plain tensor with attributes.
    """
    # Read in the source of torch 2.15: distributed/checkpoint/protocol.py
    attributes = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    is_checkpointable = all(hasattr(value, attribute) for attribute in attributes)
    has_plan = hasattr(value, "__create_write_items__") or hasattr(value, "local_shards")
    return has_plan or (isinstance(value, Tensor) and is_checkpointable)


def whole_chunk(shape: Sequence[int]) -> ChunkStorageMetadata:
    """Returns the only chunk of a tensor that is not cut."""
    return ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))


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


def pickled_write_item(name: str) -> WriteItem:
    """Builds DCP's description of a value that it pickles."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def table_of(
    mesh: DeviceMesh, parts: list[Part], paths: Paths
) -> tuple[Table, list[WriteItem | None]]:
    """Returns the table of the DTensors on a mesh, and for each what this rank writes."""
    entries: list[Entry] = []
    items: list[WriteItem | None] = []
    # Cuts are numbered in the order of the tensors, so all ranks use the same numbers
    cuts: dict[Hashable, int] = {}
    chunks: dict[int, ChunkStorageMetadata] = {}
    written: dict[int, list[int]] = {}  # number of replicas -> bytes per replica
    for part in parts:
        value = part.value
        assert isinstance(value, DTensor)
        replica, count = replicas(mesh, value.placements)
        # The replica with the fewest bytes so far writes this tensor
        bytes_of = written.setdefault(count, [0] * count)
        writer = bytes_of.index(min(bytes_of))
        bytes_of[writer] += value.numel() * value.element_size()
        # The writer is part of the key, because each part is reported by its writer
        cut = cuts.setdefault((value.shape, value.placements, writer), len(cuts))
        entries.append(Entry(paths[part.name], value.dtype, tuple(value.shape), cut))
        item = None
        if writer == replica and 0 not in part.chunk.sizes:  # uneven shards can be empty
            item = write_item(part)
            chunks[cut] = part.chunk
        items.append(item)
    place, size = replicas(mesh, [Replicate()] * mesh.ndim)  # of this rank in the mesh
    own = range(place, len(entries), size)
    table = Table(
        digest_of_mesh(mesh),
        digest_of(entries),
        len(entries),
        {row: entries[row] for row in own},
        [(cut, tuple(chunk.offsets), tuple(chunk.sizes)) for cut, chunk in chunks.items()],
    )
    return table, items


def digest_of(values: list[Any]) -> str:
    """Computes a hash that is the same on all ranks."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def digest_of_mesh(mesh: DeviceMesh) -> str:
    return digest_of([mesh.device_type, mesh.mesh_dim_names, mesh.mesh.tolist()])


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
        self._values: dict[str, Any] = {}  # name -> what a storage may write
        self._signature: list[Hashable] = []  # describes the state that the plan is for
        self._blocks: list[list[WriteItem | None]] = []  # what this rank may write of each block
        self._report = Report([], [])
        self._reported = False  # whether rank 0 has used the report
        # On rank 0: what all ranks have reported, and the answers
        self._reports: list[Report] = []
        self._answers: list[Answer] = []

    def __reduce__(self) -> tuple[type[PlacementSavePlanner], tuple[()]]:
        return PlacementSavePlanner, ()

    def create_local_plan(self) -> SavePlan:
        """Returns a plan without items, whose `planner_data` is the report to rank 0.

        Raises StateMismatch.
        """
        self._parts = self._local_parts.of(self.state_dict)
        self._values = pickled_values(self.state_dict)
        signature: list[Hashable] = [part.signature for part in self._parts]
        signature += self._values
        if signature != self._signature:
            self._plan()
            self._signature = signature
            self._reported = False
        self._values |= {part.name: part.local for part in self._parts}
        return SavePlan([], planner_data=None if self._reported else self._report)

    def _plan(self) -> None:
        """Decides what this rank may write, and what it reports."""
        on_mesh: dict[DeviceMesh, list[Part]] = {}
        others: list[tuple[Entry, WriteItem]] = []
        for part in self._parts:
            if isinstance(part.value, DTensor):
                on_mesh.setdefault(part.value.device_mesh, []).append(part)
            else:
                entry = Entry(self.mappings[part.name], part.value.dtype, tuple(part.value.shape))
                others.append((entry, write_item(part)))
        for name in self._values:
            others.append((Entry(self.mappings[name], None), pickled_write_item(name)))
        # Grouped by the first key: a rank's own keys, as those of its data loader, are then not
        # among the many that all ranks have, and rank 0 looks at each of these once
        groups: dict[str | int, list[tuple[Entry, WriteItem]]] = {}
        for entry, item in others:
            first = entry.path[0] if len(entry.path) > 1 else ""
            groups.setdefault(first, []).append((entry, item))

        self._report = Report([], [])
        self._blocks = []
        for mesh, parts in on_mesh.items():
            table, items = table_of(mesh, parts, self.mappings)
            self._report.tables.append(table)
            self._blocks.append(items)
        for group in groups.values():
            self._report.groups.append(packed([entry for entry, _ in group]))
            self._blocks.append([item for _, item in group])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Runs on rank 0: returns for each rank a plan with what it writes, and the metadata.

        Raises StateMismatch if the parts of a tensor do not cover it, or overlap: such a checkpoint
        could not be loaded.
        """
        if len(all_plans) == 1:
            return self._plan_alone(all_plans[0])
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

    def _plan_alone(self, plan: SavePlan) -> tuple[list[SavePlan], Metadata]:
        """Plans to write all that this rank holds: it is the only one, or saves without the others
        (`no_dist`, `use_collectives=False`).
        """
        items = [write_item(part) for part in self._parts]
        self.writers = {item.index.fqn: [0] for item in items}
        items += [pickled_write_item(name) for name in pickled_values(self.state_dict)]
        plans, metadata = create_default_global_save_plan(
            [dataclasses.replace(plan, items=items, planner_data=None)]
        )
        return plans, dataclasses.replace(metadata, planner_data=self.mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan of what this rank writes."""
        if new_plan.planner_data is None:
            return new_plan
        self._reported = True
        answer: Answer = new_plan.planner_data
        items = []
        for block, flags in zip(self._blocks, answer, strict=True):
            if flags:
                writes = unpacked(flags)
                items += [item for item in itertools.compress(block, writes) if item is not None]
        return dataclasses.replace(new_plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns this rank's part of a tensor, or a value that is pickled."""
        return self._values[index.fqn]

    def release(self) -> None:
        """Drops the tensors of the last save, but not its plan: a caller may want to free them."""
        self.state_dict = {}
        self._parts = []
        self._values = {}


class Cut(NamedTuple):
    """The chunks of all tensors that are cut alike, and the rank that writes each."""

    chunks: list[ChunkStorageMetadata]
    writers: list[int]


class Merged:
    """The values of all ranks, each of which is added once."""

    def __init__(self) -> None:
        self.values: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.paths: Paths = {}
        self.writers: dict[str, list[int]] = {}
        self._properties: dict[torch.dtype, TensorProperties] = {}

    def add(self, entry: Entry, cut: Cut, rank: int) -> bool:
        """Adds a value that this rank has reported. Returns whether no earlier rank has it.

        Raises StateMismatch if an earlier rank has another dtype or shape under its name.
        """
        name = ".".join(map(str, entry.path))
        known = self.values.get(name)
        value: TensorStorageMetadata | BytesStorageMetadata = BytesStorageMetadata()
        if entry.dtype is not None:
            properties = self._properties.setdefault(entry.dtype, TensorProperties(entry.dtype))
            value = TensorStorageMetadata(properties, torch.Size(entry.shape), cut.chunks)
        if known is not None:  # a tied embedding, a plain tensor, a copy on another mesh
            if described(known) != described(value):
                raise StateMismatch(
                    [f"{name} is {described(known)}, and on rank {rank} {described(value)}"]
                )
            return False
        self.values[name] = value
        self.paths[name] = entry.path
        if entry.dtype is not None:
            self.writers[name] = cut.writers
        return True


def combined(reports: list[Report]) -> tuple[Metadata, dict[str, list[int]], list[Answer]]:
    """Combines the reports of all ranks into the metadata, the writers of each tensor's chunks, and
    the answer to each rank. Raises StateMismatch.
    """
    merged = Merged()
    cuts = reported_cuts(reports)
    of_mesh: dict[str, bytes] = {}  # hash of a mesh -> the answer for its table
    for mesh, (first, entries) in reported_tables(reports).items():
        covered: dict[int, Shape] = {}  # cut -> the last shape compared with it
        flags = []
        for _, entry in sorted(entries.items()):
            cut = cuts.get((mesh, entry.cut), Cut([], []))
            if covered.get(entry.cut) != entry.shape:
                require_whole(entry, cut)
                covered[entry.cut] = entry.shape
            flags.append(merged.add(entry, cut, first))
        of_mesh[mesh] = packed(flags)

    answers = []
    known: set[bytes] = set()
    for rank, report in enumerate(reports):
        answer = [of_mesh[table.mesh] for table in report.tables]
        for group in report.groups:
            if group in known:  # as an earlier rank has it
                answer.append(b"")
                continue
            known.add(group)
            flags = []
            for entry in unpacked(group):
                flags.append(merged.add(entry, Cut([whole_chunk(entry.shape)], [rank]), rank))
            answer.append(packed(flags))
        answers.append(answer)
    return Metadata(merged.values, planner_data=merged.paths), merged.writers, answers


def require_whole(entry: Entry, cut: Cut) -> None:
    """Raises StateMismatch if the chunks do not cover the tensor, or overlap."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in cut.chunks]
    try:
        grid_edges(entry.shape, boxes)
    except ValueError as error:
        name = ".".join(map(str, entry.path))
        raise StateMismatch([f"{name} of shape {list(entry.shape)}: {error}"]) from None


def reported_tables(reports: list[Report]) -> dict[str, tuple[int, dict[int, Entry]]]:
    """Joins the reported parts of each table: hash of the mesh -> the first rank that has reported
    it, and its entries. Raises StateMismatch.
    """
    tables: dict[str, tuple[int, dict[int, Entry]]] = {}
    expected: dict[str, Table] = {}  # the first reported
    for rank, report in enumerate(reports):
        for table in report.tables:
            first, entries = tables.setdefault(table.mesh, (rank, {}))
            entries.update(table.entries)
            if table.digest != expected.setdefault(table.mesh, table).digest:
                raise StateMismatch(
                    [f"ranks {first} and {rank} hold other tensors on the same mesh"]
                )
    for mesh, (first, entries) in tables.items():
        if len(entries) != expected[mesh].num_entries:
            raise StateMismatch([f"not all ranks of the mesh of rank {first} take part"])
    return tables


def reported_cuts(reports: list[Report]) -> dict[tuple[str, int], Cut]:
    """Returns the cuts by the hash of their mesh and their number."""
    cuts: dict[tuple[str, int], Cut] = {}
    for rank, report in enumerate(reports):
        for table in report.tables:
            for number, offsets, sizes in table.chunks:
                cut = cuts.setdefault((table.mesh, number), Cut([], []))
                cut.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                cut.writers.append(rank)
    return cuts


class PlacementLoadPlanner(DefaultLoadPlanner):
    """Plans a load, and compares everything before anything is read.

    A floating-point tensor may be saved in another precision: it is converted. DCP's own planner
    converts any dtype to any other without a message. A value that DCP pickles is read with
    `weights_only=True`, as numbers, text, bytes, tensors and lists and dicts of these: another one
    could run code.
    """

    def create_local_plan(self) -> LoadPlan:
        """Returns a plan without items for rank 0; `finish_plan` returns the items.

        Raises StateMismatch with everything that is absent or does not fit.
        """
        assert self.metadata is not None
        self._items: list[ReadItem] = []
        self._locals: dict[str, Tensor] = {}
        known: dict[Hashable, list[ReadItem]] = {}  # many tensors share a list of chunks
        problems = []
        for name in pickled_values(self.state_dict):
            saved = self.metadata.state_dict_metadata.get(name)
            if isinstance(saved, BytesStorageMetadata):
                self._items.append(pickled_read_item(name))
            elif saved is not None:
                problems.append(f"{name} is {described(saved)}; expected no tensor")
            elif not self.allow_partial_load:
                problems.append(f"has no {name}")
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
                known[key] = create_read_items_for_chunk_list(part.name, saved, [part.chunk])
            items = known[key]
            found = sum(item.lengths.numel() for item in items)
            needed = part.chunk.sizes.numel()
            if found != needed:
                place = f"{list(part.chunk.sizes)} at {list(part.chunk.offsets)}"
                problems.append(
                    f"{part.name}: its saved parts have {found} of the {needed} numbers of this "
                    f"rank's {place}"
                )
                continue
            self._locals[part.name] = part.local
            self._items += [renamed(item, part.name) for item in items]
        if problems:
            raise StateMismatch(problems)
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Returns the plan of what this rank reads."""
        return dataclasses.replace(new_plan, items=self._items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns this rank's part of a tensor."""
        return self._locals[index.fqn]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Sets a value that was pickled. Raises StateMismatch if it may run code."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            allowed = "numbers, text, bytes, tensors, and lists and dicts of these"
            problem = f"{name}: is not read, because its pickle may run code; expected {allowed}"
            raise StateMismatch([problem]) from None
        *parents, last = self.mappings.get(name, (name,))  # none with flatten_state_dict = False
        container = self.original_state_dict
        for key in parents:
            container = container[own_key(container, key)]
        container[own_key(container, last)] = loaded


def own_key(container: Any, key: str | int) -> Any:
    """Returns a key of a dict or list from DCP's path, which has all keys of dicts as text."""
    if not isinstance(container, Mapping) or key in container:
        return key
    return next(own for own in container if str(own) == key)


def pickled_values(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that DCP pickles: all that are not tensors."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def pickled_read_item(name: str) -> ReadItem:
    """Builds DCP's description of a pickled value that is read."""
    index = MetadataIndex(name)
    nothing = torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def renamed(item: ReadItem, name: str) -> ReadItem:
    """Returns the same item for a tensor of another name that is cut alike."""
    return dataclasses.replace(
        item,
        dest_index=dataclasses.replace(item.dest_index, fqn=name),
        storage_index=dataclasses.replace(item.storage_index, fqn=name),
    )


def difference(part: Part, saved: TensorStorageMetadata | BytesStorageMetadata | None) -> str:
    """Describes what is wrong with a tensor of the checkpoint; "" if nothing is."""
    if saved is None:
        return f"has no {part.name}"
    expected = described(part.value)
    if isinstance(saved, TensorStorageMetadata):
        dtype = saved.properties.dtype
        both_float = dtype.is_floating_point and part.value.is_floating_point()
        if saved.size == part.value.shape and (both_float or dtype == part.value.dtype):
            return ""
    return f"{part.name} is {described(saved)}; expected {expected}"


def described(value: Tensor | TensorStorageMetadata | BytesStorageMetadata) -> str:
    """Describes a value's dtype and shape: "float32 [2, 3]"."""
    if isinstance(value, BytesStorageMetadata):
        return "no tensor"
    dtype = value.dtype if isinstance(value, Tensor) else value.properties.dtype
    shape = value.shape if isinstance(value, Tensor) else value.size
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
