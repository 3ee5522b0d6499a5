"""The storage of checkpoints: a StorageWriter and a StorageReader of torch.distributed.checkpoint
(DCP).

What it is: `StepWriter` writes torch's own sharded safetensors, as HuggingFaceStorageWriter does
with `save_distributed`: one file per kind and process, whose tensors have their plain names, with
the place of each part in the header (DCP_SHARDING_INFO). So torch alone opens a step folder:

    step = "outputs/debug/checkpoints/step-800"
    dcp.load(state_dict, storage_reader=HuggingFaceStorageReader(step))

`StepWriter` adds a manifest with the hash of every file (`manifest.py`), and names the folder
`step-N` only when it is complete (`folders.py`). `StepReader` takes the places of all parts from
the manifest, which is small and verified, and not from the headers of all files.
Why it is here: torch's writer builds each file in memory as one bytes object, and neither hashes
nor publishes a folder as a whole; its reader opens every file on every process. Like torch's, our
writer and reader pickle nothing.
What it costs: each process writes its parts once: 12 bytes per parameter in fp32 with AdamW, over
all processes. A reader maps only the files that hold its parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint import folders
from titanlite.checkpoint.grid import Box, Grid, grid_of
from titanlite.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    NAME,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    RunMetadata,
    TensorEntry,
    to_text,
)
from titanlite.checkpoint.planner import PlacementSavePlanner, StateMismatch, pickled_values
from titanlite.checkpoint.shard_file import Shard, ShardFile, Written, write_files
from titanlite.distributed.agreement import is_alone
from titanlite.runtime.errors import ConfigError, shortened
from titanlite.runtime.files import write_synced

logger = logging.getLogger("titanlite")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class StepWriter(StorageWriter):
    """Writes one step's folder by the plans of `planner`."""

    def __init__(
        self,
        folder: Path,
        step: int,
        planner: PlacementSavePlanner,
        extra_files: dict[str, bytes],
        facts: RunMetadata,
        failure: Exception | None = None,
    ) -> None:
        """`extra_files`: name -> content of the small files; `failure`: an earlier error of this
        process, which makes the save fail on all processes.
        """
        self.final = folders.step_folder(folder, step)
        self.step = step
        self.planner = planner
        self.extra_files = extra_files
        self.facts = facts
        self.failure = failure
        self.temporary = Path()
        self.manifest: Manifest | None = None  # on rank 0, once the step is committed

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer is for one save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: DCP cannot make this storage from a path alone."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError for an earlier failure of any type, because not every exception can
        be sent to other processes.
        """
        if self.failure is not None:
            raise RuntimeError(reason(self.failure))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raises StateMismatch for values that are no tensors: nothing here is pickled."""
        problems = []
        for name, value in pickled_values(self.planner.state_dict).items():
            problems.append(
                f"{name}: is of type {type(value).__name__}; expected plain tensors and DTensors"
            )
        if problems:
            raise StateMismatch(problems)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on rank 0: creates the temporary folder, and sends each rank its name and the number
        in the names of the rank's files.
        """
        temporary = folders.begin(self.final)
        numbered = []
        for rank, plan in enumerate(plans):
            numbered.append(dataclasses.replace(plan, storage_data=(temporary.name, rank)))
        return numbered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this process's files."""
        name, rank = plan.storage_data
        self.temporary = self.final.with_name(name)
        of_file: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            of_file.setdefault(file_name(item.index.fqn, rank), []).append(item)
        files = {}
        for file, items in of_file.items():
            tensors = {item.index.fqn: cpu_tensor(item, planner) for item in items}
            offsets = {item.index.fqn: list(item.index.offset or ()) for item in items}
            files[self.temporary / file] = Shard(tensors, offsets)
        results = []
        for path, written in write_files(files).items():
            index = MetadataIndex(path.name)
            results.append(WriteResult(index, written.entry.size, written))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Adds the small files and the manifest, and commits. Runs on rank 0 after all writes.

        Raises ValueError if the parts of a tensor do not form a grid.
        """
        files: dict[str, FileEntry] = {}
        all_finite = True
        for result in (result for of_rank in results for result in of_rank):
            written: Written = result.storage_data
            files[result.index.fqn] = written.entry
            all_finite = all_finite and written.finite
        for name, content in self.extra_files.items():
            write_synced(self.temporary / name, content)
            files[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        manifest = Manifest(
            step=self.step,
            finite=all_finite,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            torch=torch.__version__,
            files=files,
            tensors=tensor_entries(metadata, self.planner.writers),
            **self.facts._asdict(),
        )
        # The last file: it names all others with their hashes
        write_synced(self.temporary / NAME, to_text(manifest).encode())
        folders.publish(self.temporary, self.final)
        self.manifest = manifest


def cpu_tensor(item: WriteItem, planner: SavePlanner) -> Tensor:
    """Returns an item's tensor on the CPU. Raises TypeError if safetensors lacks its dtype."""
    value = planner.resolve_data(item)
    assert isinstance(value, Tensor)
    if value.dtype not in DTYPE_NAMES:
        allowed = ", ".join(map(str, DTYPE_NAMES))
        raise TypeError(f"{item.index.fqn}: is {value.dtype}; a safetensors file holds {allowed}")
    return value.cpu().contiguous()


def kind_of(fqn: str) -> str:
    """Returns the kind of file that holds the tensor.

    Parameters, and averaged ones (`optim/ema.py`), have separate files, because most readers need
    nothing else.
    """
    if fqn.startswith(("model.", "ema.")):
        return fqn.partition(".")[0]
    return "training"


def file_name(fqn: str, rank: int) -> str:
    return f"{kind_of(fqn)}-{rank:05}.safetensors"


def tensor_entries(metadata: Metadata, writers: dict[str, list[int]]) -> dict[str, TensorEntry]:
    """Builds the manifest's entries; `writers`: name -> the ranks that write the chunks.

    Raises ValueError if the parts of a tensor do not cover it, or overlap.
    """
    grids: dict[tuple[str, int], Grid] = {}  # many tensors have the same list of chunks
    entries: dict[str, TensorEntry] = {}
    for fqn, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        key = (kind_of(fqn), id(saved.chunks))
        if key not in grids:
            boxes = []
            for chunk, rank in zip(saved.chunks, writers[fqn], strict=True):
                boxes.append(Box(file_name(fqn, rank), tuple(chunk.offsets), tuple(chunk.sizes)))
            grids[key] = grid_of(saved.size, boxes)
        entries[fqn] = TensorEntry(DTYPE_NAMES[saved.properties.dtype], grids[key])
    return entries


class StepReader(StorageReader):
    """Reads a step's folder in any layout. `step_files.py` must have verified the files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader is for one folder."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: DCP cannot make this storage from a path alone."""
        return False

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Converts the manifest's tensors to DCP's metadata.

        The last parameter must not be called `kwargs`: DCP takes that name as the sign that it may
        go on without the other ranks.
        """
        chunks: dict[int, list[ChunkStorageMetadata]] = {}  # id of a grid -> its chunks
        tensors: dict[str, Any] = {}
        for name, entry in self.manifest.tensors.items():
            key = id(entry.grid)
            if key not in chunks:
                chunks[key] = [
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    for box in entry.grid.boxes()
                ]
            properties = TensorProperties(DTYPES[entry.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks[key])
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: the places of all parts are in the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills this process's parts. Raises CorruptCheckpoint."""
        files: dict[str, ShardFile] = {}
        boxes: dict[int, dict[tuple[int, ...], Box]] = {}  # id of a grid -> offsets -> box
        try:
            for item in plan.items:
                name = item.storage_index.fqn
                entry = self.manifest.tensors[name]
                key = id(entry.grid)
                if key not in boxes:
                    boxes[key] = {box.offsets: box for box in entry.grid.boxes()}
                box = boxes[key][tuple(item.storage_index.offset or ())]
                if box.file not in files:
                    files[box.file] = ShardFile(self.folder / box.file)
                place = tuple(
                    slice(start, start + length)
                    for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                saved = files[box.file].read(name, entry.dtype, box.sizes, place)
                target = planner.resolve_tensor(item).detach()
                target.copy_(saved)
                planner.commit_tensor(item, target)
        except ConfigError:
            raise
        except (OSError, SafetensorError, ValueError) as error:
            raise CorruptCheckpoint(f"{self.folder}: cannot be read: {reason(error)}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future


def reason(error: BaseException) -> str:
    """Describes an error in one line."""
    lines = str(error).strip().splitlines()
    if not lines or isinstance(error, (LookupError, AssertionError)):  # whose text says little
        return ": ".join([type(error).__name__, *lines[-1:]])
    return lines[-1]


@contextlib.contextmanager
def saving(step: int, folder: Path) -> Iterator[None]:
    """Turns an error of `dcp.save` into a SaveError, on all ranks; leaves no folder of the step.

    DCP's own error is not an Exception, and prints a page of tracebacks.
    """
    try:
        yield
    except CheckpointException as failed:
        logger.debug("%s", failed)  # with the traces of all ranks
        if not dist.is_initialized() or dist.get_rank() == 0:
            folders.discard(folders.step_folder(folder, step))
        rank, (error, _) = min(failed.failures.items())
        problem = reason(error)
        if not is_alone():
            problem = f"rank {rank}: {problem}"
        raise SaveError(f"step {step} could not be saved in {folder}: {problem}") from error


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turns an error of `dcp.load` into one about the folder, on all ranks: CorruptCheckpoint if it
    is damaged, ConfigError if a tensor does not fit, RuntimeError if the cause lies elsewhere.
    """
    try:
        yield
    except CheckpointException as failed:
        logger.debug("%s", failed)
        raise load_error(folder, failed) from None
    except CorruptCheckpoint as error:  # from a part's `load_state_dict`
        raise CorruptCheckpoint([f"{folder}: {problem}" for problem in error.problems]) from None


def load_error(folder: Path, failed: CheckpointException) -> Exception:
    """Combines the errors of all ranks into one."""
    unfit: list[str] = []
    damaged: list[str] = []
    others: list[str] = []
    for rank, (error, _) in sorted(failed.failures.items()):
        if isinstance(error, StateMismatch):
            unfit += [f"{folder}: {problem}" for problem in error.problems]
        elif isinstance(error, CorruptCheckpoint):
            damaged += error.problems
        elif isinstance(error, ConfigError):
            unfit += error.problems
        else:
            others.append(f"rank {rank}: {type(error).__name__}: {shortened(str(error), 2000)}")
    if others:
        return RuntimeError("; ".join(others))
    if unfit:
        return ConfigError(list(dict.fromkeys(unfit)))  # without repetitions
    return CorruptCheckpoint(list(dict.fromkeys(damaged)))
