"""Safetensors files: writes one from memory without a copy while hashing it, and reads one.

What it is: each process's part of a checkpoint is a file that any safetensors tool can open: 8
bytes of length, a JSON header with dtype, shape and offsets of each tensor, then the tensors'
bytes. It contains no code. If the tensors are parts of larger ones, the header has their offsets,
in the format of torch.distributed.checkpoint.
Why it is here: the library's `save_file` copies all tensors first, and neither hashes nor syncs the
file. Here one thread writes the tensors' memory, while another hashes it and checks that all values
are finite.
What it costs: hashing and checking take a core for 0.6 s per GB, in parallel to the core that
writes.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPE_NAMES, CorruptCheckpoint, FileEntry

BLOCK = 1 << 25  # bytes that are written at a time
# Keys that torch.distributed.checkpoint reads: in a file's metadata, and in each tensor's entry
SHARDING_INFO = "DCP_SHARDING_INFO"
SAVED_OFFSETS = "saved_offsets"


class Shard(NamedTuple):
    """The content of a file: tensors on the CPU, which may be parts of larger ones."""

    tensors: dict[str, Tensor]
    offsets: dict[str, list[int]]  # where each part begins in the whole tensor

    def header(self) -> bytes:
        """Builds the beginning of the file."""
        return header_bytes(self.tensors, sharding_metadata(self.offsets))


def sharding_metadata(offsets: Mapping[str, list[int]]) -> dict[str, str]:
    """Encodes the offsets of parts in their tensors for a header, as HuggingFaceStorageReader of
    torch.distributed.checkpoint expects them.
    """
    places = {name: {SAVED_OFFSETS: place} for name, place in offsets.items()}
    return {
        SHARDING_INFO: json.dumps(places, separators=(",", ":")),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }


class Written(NamedTuple):
    """A file that is on disk."""

    entry: FileEntry
    finite: bool


def write_files(files: dict[Path, Shard]) -> dict[Path, Written]:
    """Writes new safetensors files and syncs them to the disk.

    Each file has one thread that writes and syncs it and one that hashes it; they do not wait for
    each other.
    """
    with ThreadPoolExecutor(max(1, 2 * len(files))) as threads:
        sizes = {path: threads.submit(write_file, path, shard) for path, shard in files.items()}
        checks = {path: threads.submit(_hash_and_check, shard) for path, shard in files.items()}
    written = {}
    for path in files:
        size = sizes[path].result()
        digest, finite = checks[path].result()
        written[path] = Written(FileEntry(size, digest), finite)
    return written


class Described(Protocol):
    """The properties of a tensor that a header needs; the tensor need not be in memory."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


def header_bytes(tensors: Mapping[str, Described], metadata: dict[str, str] | None = None) -> bytes:
    """Builds the beginning of a file that has these tensors in this order."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = metadata
    begin = 0
    for key, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the tensor's memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, shard: Shard) -> int:
    """Writes and syncs a file; returns its size in bytes. Raises OSError."""
    with path.open("xb", buffering=0) as file:
        pieces = (memoryview(shard.header()), *map(bytes_of, shard.tensors.values()))
        for piece in pieces:
            unwritten = piece
            while len(unwritten):  # an unbuffered write may write only a part
                size = file.write(unwritten[:BLOCK])
                start_writeback(file.fileno(), file.tell() - size, size)
                unwritten = unwritten[size:]
        os.fsync(file.fileno())
        return file.tell()


def start_writeback(descriptor: int, offset: int, size: int) -> None:
    """Makes Linux start writing these bytes to the disk now, not at the sync or when much memory is
    unwritten. This is a hint; other systems ignore it.
    """
    with contextlib.suppress(AttributeError, OSError):  # macOS and some file systems lack it
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _hash_and_check(shard: Shard) -> tuple[str, bool]:
    """Computes the SHA-256 of the file, and whether all values are finite.

    It goes tensor by tensor, so that each is still in the CPU's cache for the second read.
    """
    digest = hashlib.sha256(shard.header())
    finite = True
    for tensor in shard.tensors.values():
        digest.update(bytes_of(tensor))
        finite = finite and is_finite(tensor)
    return digest.hexdigest(), finite


def is_finite(tensor: Tensor) -> bool:
    """Whether a CPU tensor has neither NaN nor infinity; uses numpy, which starts no threads."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return True
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.bfloat16:  # numpy lacks it; an exponent of ones is NaN or infinity
        exponents = flat.view(torch.int16).numpy() & 0x7F80
        return not bool((exponents == 0x7F80).any())
    values = flat.numpy()
    return bool(np.isfinite(values.max()) and np.isfinite(values.min()))  # with a NaN, both are NaN


class ShardFile:
    """A safetensors file open for reading: the library checks its header and maps it into memory.

    Raises CorruptCheckpoint if its header contradicts the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
                raise ValueError("expected a regular file")
            self._file: Any = safe_open(path, framework="pt")
            self._keys = set(self._file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptCheckpoint(f"{path}: {error}") from None

    def read(
        self, key: str, dtype: str, shape: tuple[int, ...], place: tuple[slice, ...]
    ) -> Tensor:
        """Reads the part of a tensor at `place`; `dtype` and `shape` are the manifest's."""
        if key not in self._keys:
            raise CorruptCheckpoint(f"{self.path}: no tensor {key!r}, which the manifest names")
        tensor = self._file.get_slice(key)
        in_header = (tensor.get_dtype(), tuple(tensor.get_shape()))
        if in_header != (dtype, shape):
            raise CorruptCheckpoint(
                f"{self.path}: {key!r} is {in_header}; in the manifest ({dtype!r}, {shape})"
            )
        if place == tuple(slice(0, size) for size in shape):
            return self._file.get_tensor(key)
        return tensor[place]
