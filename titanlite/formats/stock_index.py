"""The index of a stock DCP folder, `.metadata`: read without running code in it, and checked before it is used.

What it is: `.metadata` is a pickle of DCP's classes: name -> dtype, shape and chunks, and chunk -> file, offset and
length. Here it becomes DCP's `Metadata` again, with a checked `Place` for each chunk: a file of this folder and no
link, within the file's length, of the length its shape needs, and the chunks of a tensor fill it exactly once.
Why it is here: a folder from elsewhere may be damaged or malicious.
What it costs: about 0.2 ms per saved chunk (parameters, moments and processes multiply); only `.metadata` is opened.
"""

from __future__ import annotations

import logging
import math
import pickle
import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.manifest_reader import tiles
from titanlite.config.schema import ConfigError
from titanlite.formats.pickled import Made, Name, Pairs, UnsafeName, read_pickle

logger = logging.getLogger("titanlite")

MAX_INDEX_BYTES = 64 * 2**20  # some 250,000 chunks, read in a minute
WAY_OUT = "checkpoint.trust_pickle (titanlite checkpoint show: --trust-pickle)"
ENVELOPE_BYTES = 2**20  # upper bound of what torch.save adds to a tensor; it adds 2 kB

DCP = "torch.distributed.checkpoint"
OLD = "torch.distributed._shard.sharded_tensor.metadata"
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
NAMES = {  # found by saving FSDP2, AdamW, generators, numbers and nested lists
    f"{DCP}.metadata.Metadata": "the index",
    f"{DCP}.metadata.TensorStorageMetadata": "a tensor: properties, shape, chunks",
    f"{DCP}.metadata.TensorProperties": "its dtype, and fields that are not used",
    f"{DCP}.metadata._MEM_FORMAT_ENCODING": "one of these fields",
    f"{OLD}.TensorProperties": "the same two, up to torch 2.3",
    f"{OLD}.MEM_FORMAT_ENCODING": "",
    f"{DCP}.metadata.ChunkStorageMetadata": "offsets and sizes of a shard",
    f"{DCP}.metadata.BytesStorageMetadata": "an entry that is not a tensor",
    f"{DCP}.metadata.MetadataIndex": "a chunk's name, the key of its place",
    f"{DCP}.filesystem._StorageInfo": "file, offset, length",
    f"{DCP}.metadata.StorageMeta": "where and by which process it was saved",
    "pathlib.PosixPath": "that folder",
    "pathlib.WindowsPath": "",
    "pathlib._local.PosixPath": "the same in Python 3.13",
    "pathlib._local.WindowsPath": "",
    "torch.Size": "shapes",
    "torch.serialization._get_layout": "torch.strided",
    **dict.fromkeys(DTYPES, "a dtype"),
}


class Place(NamedTuple):
    """Where a chunk lies, and the shape and dtype it must have."""

    file: str
    offset: int
    length: int
    sizes: torch.Size | None  # None: not a tensor
    dtype: torch.dtype | None


def read_index(folder: Path, trust_pickle: bool = False) -> Metadata:
    """The folder's index; its `storage_data` maps each MetadataIndex to a Place.

    Raises ConfigError. `trust_pickle` unpickles as stock DCP does, which runs whatever code the file holds.
    """
    path = folder / ".metadata"
    try:
        _regular_file(path)
        if trust_pickle:
            logger.warning("%s: unpickled because it is trusted; this runs any code it holds", path)
            with path.open("rb") as file:
                metadata = pickle.load(file)
        else:
            metadata = _read_inert(path)
        metadata.storage_data = _places(folder, metadata)
        return metadata
    except UnsafeName as error:
        raise ConfigError(
            f"{path}: names {str(error)!r}, which is none of the {len(NAMES)} classes and dtypes of a DCP index and "
            f"could run code; nothing was run. If you trust the folder's author: {WAY_OUT}"
        ) from None
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path}: cannot be read ({str(error)[:200] or type(error).__name__}); expected the index that "
            "torch.distributed.checkpoint writes"
        ) from None


def _read_inert(path: Path) -> Metadata:
    size = path.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise ConfigError(
            f"{path}: {size} bytes, at most {MAX_INDEX_BYTES} are read. If you trust the folder's author: {WAY_OUT}"
        )
    with path.open("rb") as file:
        fields = _fields(read_pickle(file.read(MAX_INDEX_BYTES), NAMES), "Metadata")
    entries = {_text(name): _entry(value) for name, value in _typed(fields["state_dict_metadata"], Pairs)}
    places = [(_index(key), _fields(value, "_StorageInfo")) for key, value in _typed(fields["storage_data"], Pairs)]
    return Metadata(state_dict_metadata=entries, storage_data=dict(places))


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} was expected where a {type(value).__name__} is")
    return value


def _text(value: Any) -> str:
    return _typed(value, str)


def _fields(made: Any, name: str) -> dict[str, Any]:
    """The attributes of a recorded instance of DCP's class `name`."""
    if _typed(made, Made).name.rpartition(".")[2] != name:
        raise ValueError(f"a {name} was expected where a {made.name} is")
    return {_text(key): value for key, value in _typed(made.state or Pairs(), Pairs)}


def _size(made: Any) -> torch.Size:
    if _typed(made, Made).name != "torch.Size":
        raise ValueError(f"a shape was expected where a {made.name} is")
    (numbers,) = made.arguments
    return torch.Size([_typed(number, int) for number in _typed(numbers, tuple)])


def _index(made: Any) -> MetadataIndex:
    fields = _fields(made, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _size(offset))


def _entry(made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _typed(made, Made).name.endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(made, "TensorStorageMetadata")
    state = _typed(fields["properties"], Made).state  # (dtype, layout, requires_grad, memory format, pinned)
    dtype = DTYPES[_typed(_typed(state, tuple)[0], Name)]
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _places(folder: Path, metadata: Metadata) -> dict[MetadataIndex, Place]:
    """Where each chunk lies. Raises ConfigError if a place is impossible."""
    lengths: dict[str, int] = {}
    places: dict[MetadataIndex, Place] = {}
    for index, info in metadata.storage_data.items():
        info = info if isinstance(info, dict) else vars(info)
        name, offset, length = _text(info["relative_path"]), _typed(info["offset"], int), _typed(info["length"], int)
        if info.get("transform_descriptors"):
            raise ConfigError(f"{folder / '.metadata'}: {index.fqn[:200]!r} is compressed, which cannot be read")
        if name not in lengths:
            lengths[name] = _file_length(folder, name)
        if not 0 <= offset <= offset + length <= lengths[name]:
            raise ConfigError(
                f"{folder / name}: {lengths[name]} bytes, and .metadata says {index.fqn[:200]!r} lies at "
                f"{offset} with {length} bytes; the file is cut short or the index is another folder's"
            )
        places[index] = Place(name, offset, length, None, None)
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not tiles(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]):
            raise ConfigError(
                f"{folder / '.metadata'}: the {len(entry.chunks)} parts of {name[:200]!r} do not make up its shape "
                f"{tuple(entry.size)!r:.200}"
            )
        for chunk in entry.chunks:
            index, dtype = MetadataIndex(name, chunk.offsets), entry.properties.dtype
            nbytes = math.prod(chunk.sizes) * dtype.itemsize
            place = places.get(index)
            if place is None or not nbytes <= place.length <= nbytes + ENVELOPE_BYTES:
                stored = "are nowhere" if place is None else f"lie in {place.length}"
                raise ConfigError(f"{folder / '.metadata'}: the {nbytes} bytes of a part of {name[:200]!r} {stored}")
            places[index] = place._replace(sizes=chunk.sizes, dtype=dtype)
    return places


def _file_length(folder: Path, name: str) -> int:
    if name in ("", ".", "..") or len(name) > 255 or set(name) & set("/\\\0"):
        raise ConfigError(f"{folder / '.metadata'}: sends to {name[:200]!r}; only files of the folder itself are read")
    return _regular_file(folder / name)


def _regular_file(path: Path) -> int:
    """Its length. A link could lead anywhere, a pipe never ends."""
    try:
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; the folder is not whole") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: is a link or no file; only regular files of the folder are read")
    return found.st_size
