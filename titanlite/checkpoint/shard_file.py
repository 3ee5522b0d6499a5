"""One safetensors file: written from memory without a copy, and hashed at the same time.

What it is: each process's part of a checkpoint is a file that any safetensors tool can open: 8
bytes of length, a JSON header with dtype, shape and offsets of each tensor, then the tensors'
bytes. It contains no code.
Why it is here: the library's `save_file` copies all tensors first, and neither hashes nor syncs the
file. Here one thread writes the tensors' memory, while another hashes it and checks that all values
are finite.
What it costs: hashing and checking take a core for 0.6 s per GB, in parallel to the core that
writes.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPE_NAMES, FileEntry


class Written(NamedTuple):
    """A file that is on disk."""

    entry: FileEntry
    finite: bool


def write_files(files: dict[Path, dict[str, Tensor]]) -> dict[Path, Written]:
    """Writes tensors (on the CPU, by key) into new safetensors files and syncs them to the disk.

    Each file has one thread that writes and syncs it and one that hashes it; they do not wait for
    each other.
    """
    with ThreadPoolExecutor(max(1, 2 * len(files))) as threads:
        sizes = {path: threads.submit(_write, path, tensors) for path, tensors in files.items()}
        examined = {
            path: threads.submit(_hash_and_check, tensors) for path, tensors in files.items()
        }
        results = {path: (sizes[path].result(), *examined[path].result()) for path in files}
    return {
        path: Written(FileEntry(size, digest), finite)
        for path, (size, digest, finite) in results.items()
    }


class Described(Protocol):
    """What a header needs of a tensor, which may not be in memory."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


def header_bytes(tensors: Mapping[str, Described], metadata: dict[str, str] | None = None) -> bytes:
    """The beginning of a file that has these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, tensor in tensors.items():
        begin = end
        end = end + tensor.nbytes
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, tensors: dict[str, Tensor]) -> int:
    """Writes and syncs a file; returns its size in bytes. Raises OSError."""
    with path.open("xb", buffering=0) as file:
        for part in (memoryview(header_bytes(tensors)), *map(_bytes_of, tensors.values())):
            while len(part):  # an unbuffered write may write only a part
                part = part[file.write(part) :]
        os.fsync(file.fileno())
        return file.tell()


def _hash_and_check(tensors: dict[str, Tensor]) -> tuple[str, bool]:
    """SHA-256 of the file with these tensors, and whether all values are finite.

    Tensor by tensor, so that each is still in the CPU's cache when it is read a second time.
    """
    digest = hashlib.sha256(header_bytes(tensors))
    finite = True
    for tensor in tensors.values():
        digest.update(_bytes_of(tensor))
        finite = finite and is_finite(tensor)
    return digest.hexdigest(), finite


def is_finite(tensor: Tensor) -> bool:
    """Whether a CPU tensor contains neither NaN nor infinity. By numpy, which starts no threads."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return True
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.bfloat16:  # numpy lacks it; an exponent of ones is NaN or infinity
        return not bool(((flat.view(torch.int16).numpy() & 0x7F80) == 0x7F80).any())
    values = flat.numpy()
    return bool(np.isfinite(values.max()) and np.isfinite(values.min()))  # with a NaN, both are NaN
