"""Reading a manifest, and comparing the files of a checkpoint with it.

What it is: every field is checked before it is used, names of files above all, because the checkpoint may come from an
attacker. `file_problems` compares sizes and kinds of files; `verify_files` and `read_file` compare the hashes.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import hashlib
import itertools
import json
import math
import re
import stat
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    MAX_BYTES,
    MAX_DIMS,
    NAME,
    SEAL,
    Chunk,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
)
from titanlite.config.files import read_bounded
from titanlite.config.schema import ConfigError


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step folder, checked except for the files it names. Raises CorruptCheckpoint."""
    path = folder / NAME
    try:
        if not stat.S_ISREG((status := path.lstat()).st_mode) or status.st_size > MAX_BYTES:
            raise CorruptCheckpoint(f"{path}: expected a regular file of at most {MAX_BYTES} bytes")
        text = read_bounded(path, MAX_BYTES).decode()
        body, seal, tail = text.rpartition(SEAL)
        if not seal or tail != hashlib.sha256(body.encode()).hexdigest() + '"}\n':
            raise CorruptCheckpoint(f"{path}: its SHA-256 differs from the one at its end")
        fields = json.loads(body + "}")
        if (version := fields.pop("format")) != FORMAT:
            raise ConfigError(f"{path}: format {version!r} of another titanlite version; expected format {FORMAT}")
        return _checked(fields)
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(f"{path}: invalid manifest ({type(error).__name__}: {str(error)[:200]})") from None


def _checked(fields: dict[str, Any]) -> Manifest:
    """The fields as a Manifest. Raises ValueError, TypeError or KeyError if one is invalid."""
    files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
    for name, entry in files.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name) or name == NAME:
            raise ValueError(f"file name {name!r}")
        _require(_is_count(entry.size) and re.fullmatch("[0-9a-f]{64}", entry.sha256), f"file {name}: {entry}")
    tensors = {}
    for name, fields_of_tensor in fields.pop("tensors").items():
        tensor = TensorEntry(**fields_of_tensor)
        tensors[name] = tensor._replace(chunks=[Chunk(*chunk) for chunk in tensor.chunks])
        _check_tensor(name, tensors[name], files)
    manifest = Manifest(**fields, files=files, tensors=tensors)
    _require(_is_count(manifest.step) and isinstance(manifest.finite, bool), "step or finite")
    _require(all(map(_is_count, manifest.layout.values())), "layout")
    _require(all(isinstance(section, dict) for section in manifest.config.values()), "config")
    texts = (manifest.created, manifest.torch, manifest.data, *manifest.tensors)
    _require(
        all(isinstance(text, str) and text.isprintable() for text in texts),
        "text with characters that are not printable",
    )
    loss = manifest.validation_loss
    _require(loss is None or (isinstance(loss, float) and math.isfinite(loss)), "validation_loss")
    return manifest


def _check_tensor(name: str, entry: TensorEntry, files: dict[str, FileEntry]) -> None:
    _require(entry.dtype in DTYPES and len(entry.shape) <= MAX_DIMS, f"tensor {name!r}: {entry.dtype}")
    _require(all(map(_is_count, entry.shape)), f"tensor {name!r}: shape")
    for chunk in entry.chunks:
        counts = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
        counts = counts and all(map(_is_count, (*chunk.offsets, *chunk.sizes)))
        _require(counts and chunk.file in files, f"tensor {name!r}: chunk {chunk}")
        size = math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize
        _require(size <= files[chunk.file].size, f"tensor {name!r}: chunk {chunk} is longer than its file")
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    _require(tiles(tuple(entry.shape), boxes), f"tensor {name!r}: its chunks do not tile its shape")


def tiles(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether the boxes (offsets, sizes) that are not empty are the cells of a grid over `shape`, each exactly once.

    If they were not, a part of a loaded tensor would keep its previous values.
    """
    if len(shape) > MAX_DIMS:
        return False
    if any(len(numbers) != len(shape) or min(numbers, default=0) < 0 for box in boxes for numbers in box):
        return False
    # Sorted, not hashed: numbers from a file can be chosen so that all their hashes collide.
    boxes = sorted(box for box in boxes if 0 not in box[1])  # uneven shards may be empty
    same = any(first[0] == second[0] for first, second in itertools.pairwise(boxes))
    if same or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    for dim, length in enumerate(shape):
        starts = sorted([0, length, *(offsets[dim] for offsets, _ in boxes)])
        edges = [start for start, _ in itertools.groupby(starts)]
        for offsets, sizes in boxes:
            following = bisect.bisect_right(edges, offsets[dim])
            if following == len(edges) or edges[following] != offsets[dim] + sizes[dim]:
                return False
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


def file_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are absent, of a wrong size, or not regular files. Reads no content."""
    problems = []
    for name, entry in manifest.files.items():
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
    """One of the small files. Raises CorruptCheckpoint if the manifest does not name it, or it has changed."""
    path, entry = folder / name, manifest.files.get(name)
    if entry is None:
        raise CorruptCheckpoint(f"{path}: not in the manifest")
    if problems := file_problems(folder, dataclasses.replace(manifest, files={name: entry})):
        raise CorruptCheckpoint(problems)
    try:
        content = read_bounded(path)
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CorruptCheckpoint(f"{path}: its SHA-256 is not the one in the manifest")
    return content


def describe_os_error(path: Path, error: OSError) -> str:
    """The error as a problem of the checkpoint. Raises ConfigError if it is not one: no permission, a stale mount."""
    message = f"{path}: {error.strerror or error}"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP):
        raise ConfigError(f"{message}; the checkpoint itself may be intact") from None
    return message
