"""Token ids on disk: binary files that are memory-mapped.

What it is: each split (train, validation) is one long sequence of documents, cut into shards. A
shard is a file of little-endian uint16 (uint32 for more than 65,536 ids); a second file lists where
documents start in it (uint64), and an optional third one has a bit for each token: whether it may
be a target. A document may continue in the next shard. `manifest.json` lists the files
(`prepared_manifest.py`).
What it costs: 2 bytes per token on disk and 8 per document. Reading a sample touches only its
pages, and the processes of a node share them in the page cache.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
START = np.dtype("<u8")  # the type of a document's start: an index into its shard's tokens


class Part(NamedTuple):
    """The part of a range of positions that lies in one shard."""

    shard: int
    begin: int  # index of its first token in the shard
    end: int  # index after its last token in the shard
    first: int  # index of its first token in the range

    @property
    def in_range(self) -> slice:
        return slice(self.first, self.first + self.end - self.begin)


class Tokens:
    """The ids of one split as one long sequence over all its shards.

    Files are mapped when they are first read.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        """The manifest and the files must have been verified (`verification.py`)."""
        entry = manifest["splits"][split]
        self.documents: int = entry["documents"]
        self._folder = folder
        self._dtype = np.dtype(manifest["dtype"])
        # An empty file cannot be mapped
        self._entries = [shard for shard in entry["shards"] if shard["tokens"]]
        self._ends = list(itertools.accumulate(shard["tokens"] for shard in self._entries))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @functools.cached_property
    def _ids(self) -> list[Array]:
        paths = [self._folder / shard["file"] for shard in self._entries]
        return [np.memmap(path, self._dtype, "r") for path in paths]

    @functools.cached_property
    def _starts(self) -> list[Array]:
        starts: list[Array] = []
        for shard in self._entries:
            path = self._folder / shard["starts"]["file"]
            if path.stat().st_size:
                starts.append(np.memmap(path, START, "r"))
            else:  # an empty file cannot be mapped
                starts.append(np.empty(0, START))
        return starts

    @functools.cached_property
    def _masks(self) -> list[Array | None]:
        """One bit per token, for each shard; None: all bits are 1.

        A byte has eight bits; the first token has the highest.
        """
        masks: list[Array | None] = []
        for shard in self._entries:
            mask = None
            if shard["mask"]:
                mask = np.memmap(self._folder / shard["mask"]["file"], np.uint8, "r")
            masks.append(mask)
        return masks

    def _parts(self, start: int, end: int) -> Iterator[Part]:
        """Yields the parts of positions start to end - 1 that lie in each shard."""
        shard = bisect.bisect_right(self._ends, start)
        position = start
        while position < end:
            shard_start = self._ends[shard - 1] if shard else 0
            stop = min(end, self._ends[shard])
            yield Part(shard, position - shard_start, stop - shard_start, position - start)
            shard += 1
            position = stop

    def read(self, start: int, count: int) -> Array:
        """Reads ids start, ..., start + count - 1 as int64: (count,)."""
        out = np.empty(count, dtype=np.int64)
        for part in self._parts(start, start + count):
            out[part.in_range] = self._ids[part.shard][part.begin : part.end]
        return out

    def targets(self, start: int, count: int) -> Array | None:
        """Reads which of these tokens may be targets of the loss: (count,) bool.

        Returns None if every token of the split may.
        """
        if not any(shard["mask"] for shard in self._entries):
            return None
        out = np.ones(count, dtype=bool)
        for part in self._parts(start, start + count):
            mask = self._masks[part.shard]
            if mask is not None:
                first_byte = part.begin // 8
                end_byte = -(-part.end // 8)
                bits = np.unpackbits(mask[first_byte:end_byte], count=part.end - first_byte * 8)
                out[part.in_range] = bits[part.begin % 8 :]
        return out

    def document_starts(self, start: int, end: int) -> Array:
        """Finds the positions in [start, end) at which a document starts, sorted: int64."""
        positions = [np.empty(0, np.int64)]
        for part in self._parts(start, min(end, len(self))):
            starts = self._starts[part.shard]
            # The values must have the type START: otherwise numpy would convert the whole map
            low, high = np.searchsorted(starts, np.array([part.begin, part.end], START))
            shard_start = start + part.first - part.begin
            positions.append(starts[low:high].astype(np.int64) + shard_start)
        return np.concatenate(positions)
