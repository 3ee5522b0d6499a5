"""Token ids on disk: binary files that are memory-mapped, and a manifest.

What it is: each split (train, validation) is a sequence of shard files of little-endian uint16 (uint32 for more than
65,536 ids). They contain all documents one after the other, each between bos and eos. `manifest.json` lists the shards
with sizes and hashes, and their source.
What it costs: 2 bytes per token on disk. Reading a sample touches only its pages, and the processes of a node share
them in the page cache.
"""

from __future__ import annotations

import bisect
import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.files import read_bounded
from titanlite.config.schema import ConfigError

FORMAT = 1  # of a prepared folder
RECORD = "verified.json"  # in a prepared folder: the versions of its files that have been verified
AGAIN = "delete the folder to prepare the data again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that can store every id."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises ConfigError if it cannot be read or a field is not what it must be."""
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(read_bounded(path))
        if field := _invalid_field(manifest):
            raise ConfigError(f"{path}: invalid {field}; {AGAIN}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {AGAIN}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a manifest of prepared data ({type(error).__name__}); {AGAIN}") from None
    return manifest


def _invalid_field(manifest: dict[str, Any]) -> str:
    """The first field that is not what `tokenise` writes. Raises KeyError and the like if one is absent."""
    splits = [manifest["splits"][name] for name in ("train", "validation")]
    shards = [shard for split in splits for shard in split["shards"]]
    size = manifest["tokenizer"]["size"]
    counts = [manifest["bytes"], manifest["files"], size, *(shard["tokens"] for shard in shards)]
    counts += [split[name] for split in splits for name in ("tokens", "documents", "bytes")]
    hashes = [manifest["fingerprint"], manifest["tokenizer"]["sha256"], *(shard["sha256"] for shard in shards)]
    checks = {
        "format": manifest["format"] == FORMAT,
        "name": isinstance(manifest["name"], str) and manifest["name"].isprintable(),
        "count": all(type(count) is int and 0 <= count < 1 << 62 for count in counts),
        "SHA-256": all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes),
        "file name": all(re.fullmatch(r"(train|validation)-\d{5,9}\.bin", shard["file"]) for shard in shards),
        "file name, twice": len({shard["file"] for shard in shards}) == len(shards),
        "dtype": manifest["dtype"] == token_dtype(size).str,
        "number of tokens": all(split["tokens"] == sum(s["tokens"] for s in split["shards"]) for split in splits),
    }
    return next((name for name, valid in checks.items() if not valid), "")


def shard_files(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """File name -> entry of all shards."""
    return {shard["file"]: shard for name in ("train", "validation") for shard in manifest["splits"][name]["shards"]}


def unverified(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """The shards whose present version has not been verified. Raises ConfigError for a missing file or a wrong size."""
    versions = versions_on_disk(folder, manifest)
    try:
        record = json.loads(read_bounded(folder / RECORD))
        return [name for name, version in versions.items() if record.get(name) != version]
    except (OSError, ValueError, AttributeError, RecursionError):  # not written yet, or damaged
        return list(versions)


def versions_on_disk(folder: Path, manifest: dict[str, Any]) -> dict[str, list[Any]]:
    """Shard -> [its expected SHA-256, size of the vocabulary, bytes, time of modification in ns]."""
    versions, itemsize = {}, np.dtype(manifest["dtype"]).itemsize
    for name, shard in shard_files(manifest).items():
        path, expected = folder / name, shard["tokens"] * itemsize
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; {AGAIN}") from None
        if status.st_size != expected or not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: {status.st_size} bytes, expected {expected} in a regular file; {AGAIN}")
        versions[name] = [shard["sha256"], manifest["tokenizer"]["size"], status.st_size, status.st_mtime_ns]
    return versions


class Tokens:
    """The ids of one split as one long sequence over all its shards."""

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        """Maps the shards, which `prepare` has verified."""
        dtype = np.dtype(manifest["dtype"])
        self._shards: list[np.ndarray[Any, Any]] = []
        self._ends: list[int] = []
        total = 0
        for shard in manifest["splits"][split]["shards"]:
            if shard["tokens"]:  # an empty file cannot be mapped
                total += shard["tokens"]
                self._shards.append(np.memmap(folder / shard["file"], dtype, "r", shape=(shard["tokens"],)))
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
