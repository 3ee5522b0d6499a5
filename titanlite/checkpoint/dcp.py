"""Storage for torch.distributed.checkpoint (DCP) in safetensors and JSON: files contain no pickle.

What it is: DCP plans which process writes which piece of which tensor (one of the replicas does), and which saved
pieces a process of another layout needs. `Writer` and `Reader` implement its two storage interfaces. The
files are `model-R.safetensors` with the parameters of process R, `training-R.safetensors` with the rest of its state,
and the manifest. Parameters have separate files because most readers need nothing else.
What it costs: the plans are gathered and scattered once per save and once per load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.manifest import DTYPES, Chunk, FileEntry, Manifest, TensorEntry
from titanlite.checkpoint.shard_file import DTYPE_NAMES, ShardFile, Written, write_files


class Contents(NamedTuple):
    """The tensors and files that all processes have written."""

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    finite: bool


class Writer(StorageWriter):
    """One save. Rank 0 calls `begin`, which creates the folder, and `commit` when all processes have written."""

    def __init__(
        self,
        parent: Path,
        begin: Callable[[], Path],
        commit: Callable[[Path, Contents], None],
        failure: Exception | None = None,
    ) -> None:
        """`failure`: an earlier error of this process, which is raised on all."""
        self.parent, self.begin, self.commit, self.failure = parent, begin, commit, failure

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.failure is not None:
            raise self.failure
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn}: a checkpoint holds tensors only")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.folder = self.begin()
        name = self.folder.name  # each process adds its own parent path
        return [dataclasses.replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank = plan.storage_data
        files: dict[Path, dict[str, torch.Tensor]] = {}
        entries: dict[Path, dict[str, TensorEntry]] = {}
        for item in plan.items:
            name, data, tensor = item.index.fqn, item.tensor_data, planner.resolve_data(item)
            assert data is not None
            assert isinstance(tensor, torch.Tensor)
            shape, sizes = list(data.size), list(data.chunk.sizes)
            if 0 in sizes and 0 not in shape:
                continue  # this process holds no part of the tensor
            kind = "model" if name.startswith("model.") else "training"
            path = self.parent / folder / f"{kind}-{rank:05}.safetensors"
            chunk = Chunk(path.name, list(data.chunk.offsets), sizes)
            empty = TensorEntry(DTYPE_NAMES[data.properties.dtype], shape, [])
            entry = entries.setdefault(path, {}).setdefault(name, empty)
            entry.chunks.append(chunk)
            files.setdefault(path, {})[entry.key(name, chunk)] = tensor.detach()
        results = [
            WriteResult(MetadataIndex(path.name), written.entry.size, (written, entries[path]))
            for path, written in write_files(files).items()
        ]  # one per file, not per tensor: rank 0 gathers them from all processes
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, TensorEntry] = {}
        files: dict[str, FileEntry] = {}
        finite = True
        for result in (result for of_process in results for result in of_process):
            written: Written
            entries: dict[str, TensorEntry]
            written, entries = result.storage_data
            files[result.index.fqn] = written.entry
            finite &= written.finite
            for name, entry in entries.items():
                tensors.setdefault(name, entry._replace(chunks=[])).chunks.extend(entry.chunks)
        self.commit(self.folder, Contents(tensors, files, finite))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # unused: the folder is given to the constructor


class TensorStorageReader(StorageReader):
    """A reader that accepts DCP's plans unchanged; subclasses provide metadata and data."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # unused: the source is given to the constructor


class Reader(TensorStorageReader):
    """Reads pieces of a step folder. Raises CorruptCheckpoint if a file contradicts the manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for name, entry in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(found)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, ShardFile] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            entry = self.manifest.tensors[name]
            chunk = next(c for c in entry.chunks if torch.Size(c.offsets) == item.storage_index.offset)
            if chunk.file not in files:
                files[chunk.file] = ShardFile(self.folder / chunk.file)
            place = planner.resolve_tensor(item).detach()
            offsets, sizes = list(item.storage_offsets), list(item.lengths)
            key = entry.key(name, chunk)
            place.copy_(files[chunk.file].read(key, entry.dtype, tuple(chunk.sizes), offsets, sizes))
            planner.commit_tensor(item, place)
        future: Future[None] = Future()
        future.set_result(None)
        return future
