"""The files of a step folder, compared with its manifest before anything is loaded from them.

What it is: `file_problems` compares kinds and sizes, `verify_files` and `read_file` the hashes.
`verify_together` divides the work of `verify_files` over all ranks.
What it costs: verification reads every byte once, with several threads on each node.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint.manifest import (
    NAME,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    describe_os_error,
    parse_manifest,
    read_text,
)
from titanlite.distributed.agreement import PATIENT, broadcast, on_all_ranks
from titanlite.runtime.files import read_bounded

BLOCK_BYTES = 1 << 22  # read at a time
LATE_SECONDS = 10  # how long a network file system may take to show what rank 0 sees


def file_problems(folder: Path, files: dict[str, FileEntry]) -> list[str]:
    """Lists files that are absent, of a wrong size, or not regular. Reads no content."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                problems.append(f"{path}: expected a regular file, not a link or folder")
            elif status.st_size != entry.size:
                problems.append(f"{path}: {status.st_size} bytes; expected {entry.size}")
        except OSError as error:
            problems.append(describe_os_error(path, error))
    return problems


def read_file(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Reads one of the small files and compares its hash.

    Raises CorruptCheckpoint if the manifest does not name it, or it has changed.
    """
    path = folder / name
    entry = manifest.files.get(name)
    if entry is None:
        raise CorruptCheckpoint(f"{path}: not in the manifest")
    problems = file_problems(folder, {name: entry})
    if problems:
        raise CorruptCheckpoint(problems)
    try:
        content = read_bounded(path)
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CorruptCheckpoint(f"{path}: its SHA-256 is not the one in the manifest")
    return content


def digest_of(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """Computes the SHA-256 of a file, in hexadecimal.

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


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: list[str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """Lists the problems of a checkpoint's files, or of those in `names`: hashes all bytes.

    `progress` is called with the number of bytes of each block, by several threads.
    """
    entries = manifest.files
    if names is not None:
        entries = {name: manifest.files[name] for name in names}
    problems = file_problems(folder, entries)
    if problems:
        return problems

    def problem_of(name: str) -> str:
        path = folder / name
        try:
            if digest_of(path, progress) == entries[name].sha256:
                return ""
            return f"{path}: its SHA-256 is not the one in the manifest"
        except OSError as error:
            return describe_os_error(path, error)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return [problem for problem in threads.map(problem_of, entries) if problem]


def verify_together(folder: Path, prefix: str = "") -> Manifest:
    """Verifies the files whose names begin with `prefix`, and returns the manifest. Each rank reads
    some of the files.

    Raises on all ranks CorruptCheckpoint with the problems of all, or the error of a rank that
    fails for a reason outside the checkpoint.
    """
    path = folder / NAME
    deadline = time.monotonic() + LATE_SECONDS

    def read_on_rank0() -> str:
        return read_text(path) if dist.get_rank() == 0 else ""

    text = broadcast(on_all_ranks(read_on_rank0, PATIENT, CorruptCheckpoint), PATIENT)

    def verify() -> Manifest:
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.1)
        manifest = parse_manifest(path, text)
        if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
            raise CorruptCheckpoint(f"{folder}: its manifest is that of step {manifest.step}")
        names = sorted(name for name in manifest.files if name.startswith(prefix))
        problems = verify_files(folder, manifest, names[dist.get_rank() :: dist.get_world_size()])
        if problems:
            raise CorruptCheckpoint(problems)
        return manifest

    manifest: Manifest = on_all_ranks(verify, PATIENT, CorruptCheckpoint)
    return manifest
