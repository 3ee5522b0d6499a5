"""Reading a safetensors file: its hash, and parts of its tensors.

The library checks headers and maps the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint

BLOCK_BYTES = 1 << 22  # read at a time


def digest_of(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a file in hexadecimal.

    `progress` is called with the number of bytes of each block.
    """
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            if progress:
                progress(size)
    return digest.hexdigest()


class ShardFile:
    """A safetensors file open for reading.

    Raises CorruptCheckpoint if its header contradicts the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise ValueError("expected a regular file")
            self._file: Any = safe_open(path, framework="pt")
            self._keys = set(self._file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptCheckpoint(f"{path}: {error}") from None

    def read(
        self, key: str, dtype: str, shape: tuple[int, ...], place: tuple[slice, ...]
    ) -> Tensor:
        """The part of a tensor in `place`."""
        if key not in self._keys:
            raise CorruptCheckpoint(f"{self.path}: no tensor {key!r}, which the manifest names")
        piece = self._file.get_slice(key)
        found = (piece.get_dtype(), tuple(piece.get_shape()))
        if found != (dtype, shape):
            raise CorruptCheckpoint(
                f"{self.path}: {key!r} is {found}; in the manifest ({dtype!r}, {shape})"
            )
        if place == tuple(slice(0, size) for size in shape):
            return self._file.get_tensor(key)
        return piece[place]
