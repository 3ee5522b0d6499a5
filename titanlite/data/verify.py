"""Verification of prepared data: the SHA-256 of each shard, and that its ids are in the vocabulary.

What it is: a pass over all shards at the first start after they were made or changed. Their sizes, modification times
and hashes are then written to `verified.json` beside them; later starts read only these.
What it costs: about a second per GB and core, once for each version of a file; at each start if the folder cannot be
written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.files import replace_file
from titanlite.config.progress import progress_bar
from titanlite.config.schema import ConfigError
from titanlite.data.shards import AGAIN, RECORD, shard_files, versions_on_disk

BLOCK = 1 << 22  # bytes, a multiple of every id's size


def verify(folder: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Reads these shards. Raises ConfigError with those that have changed since they were written."""
    shards, versions = shard_files(manifest), versions_on_disk(folder, manifest)
    with progress_bar(sum((folder / name).stat().st_size for name in names), "verifying the data") as bar:

        def problem(name: str) -> str:
            try:
                return _problem(folder / name, shards[name]["sha256"], manifest, bar.update)
            except OSError as error:
                return f"{folder / name}: {error.strerror or error}"

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            if problems := [found for found in threads.map(problem, names) if found]:
                raise ConfigError(problems)
    with contextlib.suppress(OSError):  # a folder that cannot be written is verified at each start
        replace_file(folder / RECORD, json.dumps(versions).encode())


def _problem(path: Path, sha256: str, manifest: dict[str, Any], progress: Any) -> str:
    digest, largest, dtype = hashlib.sha256(), -1, np.dtype(manifest["dtype"])
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype).max()))
            progress(len(block))
    if digest.hexdigest() != sha256:
        return f"{path}: its SHA-256 has changed since it was prepared; {AGAIN}"
    if largest >= (size := manifest["tokenizer"]["size"]):
        return f"{path}: holds token id {largest}; expected ids below {size}, the size of its tokenizer; {AGAIN}"
    return ""
