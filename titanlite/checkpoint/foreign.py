"""Weights from a stock DCP folder (`.metadata` + `*.distcp`), as torchtitan and others write them; nothing is run.

What it is: DCP plans which process reads which part, for any layout of source and target; `StockReader` is the
storage under it. Stock DCP unpickles the index and each non-tensor entry, which runs code of the file's author, and
reads tensors without a checksum. Here the index comes from `foreign_index.py`, non-tensor entries are refused, and a
tensor's envelope (torch.save's zip: a pickle that names a storage, and its bytes) is read as data, CRC checked.
What it costs: each process reads the chunks that its parameters lie in, one in memory at a time.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from titanlite.checkpoint.foreign_index import Place, read_index
from titanlite.checkpoint.pickled import Made, Name, read_pickle
from titanlite.config import ConfigError
from titanlite.spelling import suggestion

logger = logging.getLogger("titanlite")

STORAGES = {  # dtypes that weights are saved in
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
}
TENSOR_NAMES = {  # what torch.save writes for one tensor
    "torch._utils._rebuild_tensor_v2": "storage, offset, shape, strides",
    "collections.OrderedDict": "its backward hooks: none",
    **dict.fromkeys(STORAGES, "its dtype"),
}


def is_stock_dcp(path: Path) -> bool:
    """Whether the folder is one that `torch.distributed.checkpoint` has written."""
    return os.path.isfile(path / ".metadata")  # False for any path, as Path.is_file is not


def stock_tensors(path: Path, trust_pickle: bool = False) -> dict[str, TensorStorageMetadata]:
    """The tensors of the folder by name, with `.size` and `.properties.dtype`. Raises ConfigError."""
    entries = read_index(path, trust_pickle).state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def read_stock(path: Path, state: dict[str, Any], *, trust_pickle: bool = False, alone: bool = False) -> None:
    """Fills `state` (parameter name -> Tensor or DTensor) in place, all processes together or this one `alone`.

    The folder has the names as they are or below `model.`. Dtypes may differ: this takes weights, not a run to resume.
    Raises ConfigError, on all processes if on any.
    """
    problems = _fill(path, state, trust_pickle)
    if not alone and dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, problems)
        problems = list(dict.fromkeys(problem for each in everyone for problem in each))
    if problems:
        raise ConfigError(problems)


class StockReader(FileSystemReader):
    """Reads tensors of a stock DCP folder for DCP's planners, in any process; runs nothing."""

    def __init__(self, path: Path, trust_pickle: bool = False) -> None:
        super().__init__(path)
        self._folder, self._trust_pickle = Path(path), trust_pickle
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:  # a rank of its own, which DCP asks for next, is not read either
            self._index = read_index(self._folder, self._trust_pickle)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or place.sizes is None:
                raise ConfigError(f"{self._folder}: {item.storage_index.fqn!r} is no tensor, and only tensors are read")
            with (self._folder / place.file).open("rb") as file:
                try:
                    tensor = _read_tensor(file, place)
                except Exception as error:
                    raise ConfigError(
                        f"{self._folder / place.file}: {item.storage_index.fqn!r} cannot be read "
                        f"({str(error)[:200] or type(error).__name__}); expected one tensor as torch.save writes it"
                    ) from None
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
            del tensor  # before the next one is made
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(path: Path, state: dict[str, Any], trust_pickle: bool) -> list[str]:
    """Reads what this process has to; returns the problems."""
    try:
        reader = StockReader(path, trust_pickle)
        entries = reader.read_metadata().state_dict_metadata
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        below = any(name.startswith("model.") for name in tensors) and not any(name in tensors for name in state)
        prefix = "model." if below else ""
        if problems := _differences(path, state, tensors, prefix):
            return problems
        targets = {prefix + name: tensor for name, tensor in state.items()}
        converted = {f"{tensors[name].properties.dtype} -> {tensor.dtype}" for name, tensor in targets.items()}
        logger.info("%s: %d tensors, %s", path, len(targets), ", ".join(sorted(converted)))
        with warnings.catch_warnings():
            # Loading needs no collectives: each process plans for itself. `read_stock` agrees on how it went.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(targets, storage_reader=reader, planner=planner, no_dist=True)
        return []
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        return [str(cause) if isinstance(cause, ConfigError) else f"{path}: cannot be read ({cause!r:.200})"]


def _differences(
    path: Path, state: dict[str, Tensor], tensors: dict[str, TensorStorageMetadata], prefix: str
) -> list[str]:
    """What keeps the folder's tensors from filling `state`."""
    missing = [name for name in state if prefix + name not in tensors]
    problems = []
    for name in missing[:8]:
        near = [
            other.removeprefix(prefix)
            for other, entry in tensors.items()
            if entry.size == state[name].shape and len(other) < 200 and not other.startswith("optimizer.")
        ]
        problems.append(f"{path}: has no {name!r}{suggestion(name, near[:500])}")
    if len(missing) > 8:
        problems.append(f"{path}: lacks {len(missing) - 8} more of the model's {len(state)} parameters")
    for name, tensor in state.items():
        if entry := tensors.get(prefix + name):
            if entry.size != tensor.shape:
                problems.append(f"{path}: {name!r} is {tuple(entry.size)}; the model's is {tuple(tensor.shape)}")
            elif entry.properties.dtype not in STORAGES.values():
                allowed = ", ".join(str(dtype) for dtype in STORAGES.values())
                problems.append(f"{path}: {name!r} is {entry.properties.dtype}; weights are {allowed}")
    return problems


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        if self._at < 0:
            raise ValueError("it is cut short")
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        piece = self._file.read(left if count < 0 else min(count, left))
        self._at += len(piece)
        return piece


def _read_tensor(file: BinaryIO, place: Place) -> Tensor:
    """The tensor that torch.save has written there. Raises ValueError and what zipfile and torch raise."""
    with zipfile.ZipFile(_Slice(file, place.offset, place.length)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > place.length for info in records.values()):
            raise ValueError("it is compressed")
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise ValueError("it was written on a big-endian machine")
        dtype, storage, layout = _describe(read_pickle(archive.read(records["data.pkl"]), TENSOR_NAMES))
        if dtype != place.dtype or layout[1] != place.sizes:
            raise ValueError(f"it is {dtype} of shape {layout[1]}, and .metadata says {place.dtype}, {place.sizes}")
        record = records[f"data/{storage}"]
        values = torch.empty(record.file_size // dtype.itemsize, dtype=dtype)
        view, at = values.view(torch.uint8).numpy(), 0
        with archive.open(record) as stream:
            while piece := stream.read(2**24):
                view[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
    start, shape, strides = layout
    return values.as_strided(shape, strides, start)


def _describe(made: Any) -> tuple[torch.dtype, str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """dtype, storage's name and (offset, shape, strides) of a tensor's pickle."""
    if type(made) is not Made or made.name != "torch._utils._rebuild_tensor_v2" or made.state is not None:
        raise ValueError("it is no tensor")
    stored, start, shape, strides, *_ = made.arguments
    if type(stored) is not Made or stored.name != "persistent" or len(stored.arguments) != 5:
        raise ValueError("its storage is elsewhere")
    _, kind, name, _, _ = stored.arguments
    numbers = (start, *shape, *strides)
    if (
        type(kind) is not Name  # before it is looked up: hashing what is in a file can take any stack
        or kind not in STORAGES
        or type(name) is not str
        or any(type(number) is not int or number < 0 for number in numbers)
    ):
        raise ValueError("it is no tensor of a dtype that weights have")
    return STORAGES[kind], name, (start, shape, strides)
