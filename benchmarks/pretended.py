"""Makes one process a rank of many: the tensors that it would hold, and the messages that the other
ranks would send to rank 0 in a save.

The process group is torch's fake one. The layout is tp 8, the rest dp_shard, and the optimizer
AdamW. The messages of the others follow from the placements; `many_ranks.py` compares them with the
plan of a process that pretends to be another rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from titanlite.checkpoint.manifest import FileEntry
from titanlite.checkpoint.planner import Entry, Report, Table, digest_of, digest_of_mesh, packed
from titanlite.checkpoint.shard_file import Written
from titanlite.checkpoint.state import ModelState, State
from titanlite.config.load import load_config
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.parallelize import split_and_parallelize

Offsets = tuple[int, ...]
Sizes = tuple[int, ...]
TP = 8
OPTIONS = [
    f"--parallel.tp={TP}",
    "--run.device=cpu",
    "--compile.enabled=false",
    "--recompute.mode=none",
    "--training.compute_dtype=bfloat16",
    "--training.reduce_dtype=float32",
]


def state_of(llama: LlamaConfig, ranks: int, rank: int) -> State:
    """Builds the state of a run that this rank of so many would hold, on the meta device."""
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    config = load_config(["debug", *OPTIONS])
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": ranks // TP, "cp": 1, "tp": TP}
    mesh = Mesh("cpu", degrees, 600)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split_and_parallelize(model, config, mesh, compiled=False)
    weights = ModelState(parts).state_dict()
    optimizer: dict[str, Tensor] = {}
    for name, weight in weights.items():
        optimizer[f"state.{name}.exp_avg"] = torch.empty_like(weight)
        optimizer[f"state.{name}.exp_avg_sq"] = torch.empty_like(weight)
        optimizer[f"state.{name}.step"] = torch.zeros(())
    return {"model": weights, "optimizer": optimizer}


def on_cpu(state: State, local: Callable[[Size], Tensor]) -> State:
    """Replaces this rank's parts of the state by CPU tensors, which `local` makes from shapes."""

    def moved(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        part = local(value.to_local().shape)
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            part, mesh, placements, shape=value.shape, stride=value.stride(), run_check=False
        )

    return {
        part: {name: moved(value) for name, value in values.items()}
        for part, values in state.items()
    }


@functools.cache  # many tensors share one, and a strided shard takes up to 60 ms
def box_of(
    shape: Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int
) -> tuple[Offsets, Sizes]:
    """Computes offsets and sizes of a rank's part of a DTensor."""
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    sizes, offsets = _compute_local_shape_and_global_offset(
        shape, tuple(mesh.shape), place, placements
    )
    return tuple(offsets), tuple(sizes)


class Layout(NamedTuple):
    """One of the ways in which tensors are cut."""

    value: DTensor  # with this layout
    writer: int  # the replica, along tp, that is written


class Others:
    """The messages that each rank of the group sends to rank 0."""

    def __init__(self, state: State, ranks: int) -> None:
        self.ranks = ranks
        planner = DefaultSavePlanner()  # flattens the state
        planner.set_up_planner(state)
        self._tensors = planner.state_dict
        self._table: list[Entry] = []  # of the DTensors, which are on one mesh
        self._layouts: list[Layout] = []
        plain: list[Entry] = []
        numbers: dict[Hashable, int] = {}
        bytes_of = [0] * TP  # bytes that each replica writes
        for name, value in self._tensors.items():
            path = planner.mappings[name]
            if not isinstance(value, DTensor):
                plain.append(Entry(path, value.dtype, tuple(value.shape)))
                continue
            self._mesh = value.device_mesh
            writer = 0
            if value.placements[1].is_replicate():
                writer = bytes_of.index(min(bytes_of))
                bytes_of[writer] += value.numel() * value.element_size()
            key = (value.shape, value.placements, writer)
            if key not in numbers:
                numbers[key] = len(numbers)
                self._layouts.append(Layout(value, writer))
            self._table.append(Entry(path, value.dtype, tuple(value.shape), numbers[key]))
        self._groups = [packed(plain)]  # all of them belong to the optimizer

    def report(self, rank: int) -> Report:
        """Makes the report of a rank's PlacementSavePlanner."""
        boxes: list[tuple[int, Offsets, Sizes]] = []
        for number, (value, writer) in enumerate(self._layouts):
            box = box_of(value.shape, value.device_mesh, value.placements, rank)
            replica = rank % TP if value.placements[1].is_replicate() else 0
            if replica == writer and 0 not in box[1]:
                boxes.append((number, *box))
        own = range(rank, len(self._table), self.ranks)
        entries = {row: self._table[row] for row in own}
        mesh = digest_of_mesh(self._mesh)
        table = Table(mesh, digest_of(self._table), len(self._table), entries, boxes)
        return Report([table], self._groups)

    def written(self, rank: int) -> list[WriteResult]:
        """Makes the results of a rank's StepWriter."""
        results = []
        for kind in ("model", "training"):
            name = f"{kind}-{rank:05}.safetensors"
            # The manifest's reader requires at least the size of the tensors
            entry = FileEntry(1 << 40, hashlib.sha256(name.encode()).hexdigest())
            results.append(WriteResult(MetadataIndex(name), entry.size, Written(entry, True)))
        return results

    def stock_plan(self, rank: int, own: SavePlan) -> SavePlan:
        """Makes the plan of a rank's DefaultSavePlanner; `own`: rank 0's plan."""
        items = []
        for item in own.items:
            value = self._tensors[item.index.fqn]
            if isinstance(value, DTensor):
                assert item.tensor_data is not None
                offsets, sizes = box_of(value.shape, value.device_mesh, value.placements, rank)
                # New objects for each item, as in a planner: shared ones would be pickled once
                chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, offsets)
                item = dataclasses.replace(item, index=index, tensor_data=data)
            items.append(item)
        return dataclasses.replace(own, items=items)


def stock_written(rank: int, plan: SavePlan) -> list[WriteResult]:
    """Makes the results of a rank's FileSystemWriter, from its part of the global plan."""
    name = f"__{rank}_0.distcp"
    results = []
    offset = 0
    for item in plan.items:
        assert item.tensor_data is not None
        length = 4 * math.prod(item.tensor_data.chunk.sizes) + 1200  # what torch.save adds
        results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        offset += length
    return results
