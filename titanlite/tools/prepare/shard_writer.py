"""Writes the shard files of one part of a corpus.

What it is: ids, document starts and target masks of one split, written under temporary names,
hashed as they are written, and renamed when they are complete and on the disk.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.shards import START

TEMPORARY = ".tmp-"  # in the names of files that are being written


class HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}{TEMPORARY}{secrets.token_hex(4)}")
        self._file = self._temporary.open("xb")
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)

    def finish(self) -> dict[str, Any]:
        """Syncs and renames the file, and returns its entry of the manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)
        return {"file": self.path.name, "sha256": self._hash.hexdigest()}

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardWriter:
    """Appends documents to `folder/<split>-<number>.bin` and the files beside it."""

    def __init__(
        self, folder: Path, split: str, number: int, dtype: np.dtype[Any], masked: bool = False
    ) -> None:
        name = f"{split}-{number:05d}"
        self.dtype = dtype
        self.text_bytes = 0
        self.tokens = 0
        self.documents = 0
        self._ids = HashedFile(folder / f"{name}.bin")
        self._starts = HashedFile(folder / f"{name}.starts.bin")
        self._mask = HashedFile(folder / f"{name}.mask.bin") if masked else None
        self._bits = np.empty(0, dtype=bool)  # the mask's last bits, fewer than a byte

    def begin_document(self) -> None:
        """The next token that is written is the first of a document."""
        self._starts.write(np.array([self.tokens], START).tobytes())
        self.documents += 1

    def write(self, ids: list[int] | np.ndarray[Any, Any], targets: bool = True) -> None:
        """Appends ids. `targets`: whether they may be targets of the loss."""
        self._ids.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)
        if self._mask is not None:
            bits = np.concatenate([self._bits, np.full(len(ids), targets)])
            whole = len(bits) // 8 * 8
            self._mask.write(np.packbits(bits[:whole]).tobytes())
            self._bits = bits[whole:]

    def finish(self) -> dict[str, Any]:
        """Completes the files and returns the shard's entry of the manifest."""
        mask = None
        if self._mask is not None:
            self._mask.write(np.packbits(self._bits).tobytes())
            mask = self._mask.finish()
        return {
            **self._ids.finish(),
            "tokens": self.tokens,
            "documents": self.documents,
            "starts": self._starts.finish(),
            "mask": mask,
        }

    def discard(self) -> None:
        for file in (self._ids, self._starts, self._mask):
            if file is not None:
                file.discard()
