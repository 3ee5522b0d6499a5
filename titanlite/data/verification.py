"""Verification of prepared data: sizes, SHA-256, ids in the vocabulary, document starts in order.

What it is: a pass over all files at the first start after they were made or changed. Their sizes,
modification times and hashes are then written to `verified.json` beside them; later starts read
only these.
What it costs: about a second per GB and core, once for each version of a file, or at each start if
the folder is read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.data.prepared_manifest import AGAIN, MANIFEST_BYTES, read_manifest, token_dtype
from titanlite.data.shards import START, Array
from titanlite.runtime.documents import read_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.runtime.progress import progress_bar

BLOCK = 1 << 22  # bytes, a multiple of every item's size
RECORD = "verified.json"  # in a prepared folder: the versions of its files that have been verified


class Expected(NamedTuple):
    """A file of a prepared folder as its manifest describes it."""

    sha256: str
    size: int  # bytes
    kind: str  # ids, starts or mask
    limit: int  # every id, or every start, must be below it
    first: bool  # the first shard of its split, which begins with a document


def expected_files(manifest: dict[str, Any]) -> dict[str, Expected]:
    """Maps each file of both splits to what the manifest says about it."""
    files = {}
    vocabulary = manifest["tokenizer"]["size"]
    for split in ("train", "validation"):
        for i, shard in enumerate(manifest["splits"][split]["shards"]):
            tokens = shard["tokens"]
            starts = shard["starts"]
            mask = shard["mask"]
            size = tokens * token_dtype(vocabulary).itemsize
            files[shard["file"]] = Expected(shard["sha256"], size, "ids", vocabulary, i == 0)
            size = shard["documents"] * START.itemsize
            files[starts["file"]] = Expected(starts["sha256"], size, "starts", tokens, i == 0)
            if mask is not None:
                files[mask["file"]] = Expected(mask["sha256"], -(-tokens // 8), "mask", 0, i == 0)
    return files


def unverified(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Lists the files whose present version has not been verified.

    Raises ConfigError for a missing file or a wrong size.
    """
    versions = _versions_on_disk(folder, manifest)
    try:
        verified = read_json(folder / RECORD, MANIFEST_BYTES)
    except (OSError, ValueError):  # not written yet, or damaged
        verified = {}
    if not isinstance(verified, dict):
        verified = {}
    return [name for name, version in versions.items() if verified.get(name) != version]


def _versions_on_disk(folder: Path, manifest: dict[str, Any]) -> dict[str, list[Any]]:
    """Maps each file to [expected SHA-256, limit of its items, bytes, modification time in ns]."""
    versions = {}
    problems = []
    for name, expected in expected_files(manifest).items():
        path = folder / name
        try:
            status = path.stat()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}; {AGAIN}")
            continue
        if status.st_size != expected.size or not stat.S_ISREG(status.st_mode):
            end = min(status.st_size, expected.size)
            problems.append(
                f"{path}: {status.st_size} bytes, expected {expected.size} in a regular file: "
                f"the data ends at byte {end}; {AGAIN}"
            )
        versions[name] = [expected.sha256, expected.limit, status.st_size, status.st_mtime_ns]
    if problems:
        raise ConfigError(problems)
    return versions


def verify_changed(folder: Path) -> None:
    """Verifies the files of a prepared folder that have changed since they were verified.

    If several processes start together, one verifies; the others wait, and find nothing to do.
    Raises ConfigError with what is damaged.
    """
    manifest = read_manifest(folder)
    if not unverified(folder, manifest):
        return
    with (folder / "manifest.json").open() as lock:
        with contextlib.suppress(OSError):  # without locks, each process verifies it
            fcntl.flock(lock, fcntl.LOCK_EX)
        names = unverified(folder, manifest)  # another process may have verified them
        if names:
            verify(folder, manifest, names)


def verify(folder: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Reads and verifies these files.

    Raises ConfigError with those that contradict the manifest, and the offset.
    """
    files = expected_files(manifest)
    dtype = token_dtype(manifest["tokenizer"]["size"])
    versions = _versions_on_disk(folder, manifest)
    with progress_bar(sum(files[name].size for name in names), "verifying the data") as bar:

        def problem(name: str) -> str:
            try:
                return _problem(folder / name, files[name], dtype, bar.update)
            except OSError as error:
                return f"{folder / name}: {error.strerror or error}"

        # Hashing and numpy's comparisons release the interpreter's lock
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            problems = [message for message in threads.map(problem, names) if message]
            if problems:
                raise ConfigError(problems)
    with contextlib.suppress(OSError):  # a read-only folder is verified at each start
        replace_file(folder / RECORD, json.dumps(versions).encode())


def _problem(
    path: Path, expected: Expected, dtype: np.dtype[Any], progress: Callable[[int], object]
) -> str:
    """Describes what is wrong with a file; "" if nothing is.

    An item out of bounds is reported first, because it explains more than a wrong hash.
    """
    digest = hashlib.sha256()
    offset = 0
    last = -1
    wrong = ""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if not wrong and expected.kind == "ids":
                wrong = _wrong_id(np.frombuffer(block, dtype), expected.limit, offset)
            elif not wrong and expected.kind == "starts":
                starts = np.frombuffer(block, START)
                wrong = _wrong_start(starts, last, expected, offset)
                last = int(starts[-1])
            offset += len(block)
            progress(len(block))
    if wrong:  # reported after the whole file, so that the progress bar is complete
        return f"{path}: {wrong}; {AGAIN}"
    if digest.hexdigest() != expected.sha256:
        return f"{path}: its SHA-256 has changed since it was prepared; {AGAIN}"
    return ""


def _wrong_id(ids: Array, size: int, offset: int) -> str:
    """Describes the first id beyond the vocabulary; "" if none. `offset`: byte of `ids[0]`."""
    if int(ids.max()) < size:
        return ""
    first = int(np.argmax(ids >= size))
    byte = offset + first * ids.itemsize
    return (
        f"holds token id {ids[first]} at byte {byte}; "
        f"expected ids below {size}, the size of its tokenizer"
    )


def _wrong_start(starts: Array, last: int, expected: Expected, offset: int) -> str:
    """Describes the first document start that does not ascend, or is beyond the shard; "" if none.

    `last`: the start before these, -1 for none.
    """
    if expected.first and last < 0 and starts[0] != 0:
        return f"the first document starts at token {starts[0]}, expected 0"
    # A damaged file may have any uint64; the limit fits in int64
    values = np.minimum(starts, expected.limit).astype(np.int64)
    bad = (np.diff(values, prepend=last) <= 0) | (values == expected.limit)
    if not bad.any():
        return ""
    first = int(np.argmax(bad))
    previous = values[first - 1] if first else last
    byte = offset + first * START.itemsize
    return (
        f"a document starts at token {starts[first]}, at byte {byte}; "
        f"expected more than {previous} and less than {expected.limit}"
    )
