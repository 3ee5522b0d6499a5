"""Token ids on disk: binary files that are memory-mapped, and a manifest.

What it is: each split (train, validation) is a sequence of shard files of little-endian uint16 (uint32 for more than
65,536 ids). They contain all documents one after the other, each between bos and eos. `manifest.json` lists the shards
with sizes and hashes, and their source.
What it costs: 2 bytes per token on disk. Reading a sample touches only its pages, and the processes of a node share
them in the page cache.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.schema import ConfigError
from titanlite.data.tokenizer import Tokenizer

FORMAT = 1  # of a prepared folder
SHARD_TOKENS = 100_000_000


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that can store every id."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


class ShardWriter:
    """Appends token ids to `folder/<split>-00000.bin`, -00001, ..., each of at most `shard_tokens`."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.documents = self.text_bytes = 0
        self._open()

    def _open(self) -> None:
        path = self.folder / f"{self.split}-{len(self.shards):05d}.bin"
        self._file, self._hash, self._tokens = path.open("wb"), hashlib.sha256(), 0

    def _close(self) -> None:
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append({"file": name, "tokens": self._tokens, "sha256": self._hash.hexdigest()})

    def write(self, ids: list[int]) -> None:
        while ids:
            part, ids = ids[: self.shard_tokens - self._tokens], ids[self.shard_tokens - self._tokens :]
            content = np.asarray(part, dtype=self.dtype).tobytes()
            self._file.write(content)
            self._hash.update(content)
            self._tokens += len(part)
            if self._tokens == self.shard_tokens:
                self._close()
                self._open()

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the split's entry of the manifest."""
        self._close()
        tokens = sum(shard["tokens"] for shard in self.shards)
        return {"tokens": tokens, "documents": self.documents, "bytes": self.text_bytes, "shards": self.shards}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises ConfigError if it cannot be read."""
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; delete the folder to prepare the data again") from None
    return manifest


class PreparedData:
    """A folder that `prepare` made: its manifest, the tokenizer it was made with, and the tokens of its splits."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the manifest cannot be read."""
        self.folder, self.tokenizer, self.manifest = folder, tokenizer, read_manifest(folder)
        self.name: str = self.manifest["name"]
        self.fingerprint: str = self.manifest["fingerprint"]

    def tokens(self, split: str) -> Tokens:
        """The tokens of `train` or `validation`."""
        return Tokens(self.folder, self.manifest, split)


class Tokens:
    """The ids of one split as one long sequence over all its shards."""

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        """Maps the shards. Raises ConfigError with the path of a file that is missing or has another size."""
        dtype = np.dtype(manifest["dtype"])
        self._shards: list[np.ndarray[Any, Any]] = []
        self._ends: list[int] = []
        total = 0
        for shard in manifest["splits"][split]["shards"]:
            path, expected = folder / shard["file"], shard["tokens"] * dtype.itemsize
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                state = "missing" if found is None else f"{found} bytes, expected {expected}"
                raise ConfigError(f"{path}: {state}; delete the folder {folder} to prepare the data again")
            if expected:  # an empty file cannot be mapped
                total += shard["tokens"]
                self._shards.append(np.memmap(path, dtype, "r"))
                self._ends.append(total)
        self._total = total

    def __len__(self) -> int:
        return self._total

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Ids start, ..., start + count - 1 as int64: (count,)."""
        out = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            index = bisect.bisect_right(self._ends, start + filled)
            shard = self._shards[index]
            offset = start + filled - (self._ends[index] - len(shard))
            part = shard[offset : offset + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out
