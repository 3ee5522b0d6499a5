"""Reading a manifest, and comparing the files of a checkpoint with it.

What it is: every field is checked before it is used, names of files above all, because the
checkpoint may come from an attacker. `file_problems` compares sizes and kinds of files;
`verify_files` and `read_file` compare the hashes.
Format 1, that of older checkpoints, lists the parts of each tensor instead of a grid.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.checkpoint.grid import MAX_DIMS, Box, Grid, grid_of
from titanlite.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    MAX_BYTES,
    NAME,
    SEAL,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
)
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step folder, checked except for the files it names.

    Raises CorruptCheckpoint.
    """
    return parse_manifest(folder / NAME, read_text(folder / NAME))


def read_text(path: Path) -> str:
    """The text of a manifest. Raises CorruptCheckpoint."""
    try:
        if not stat.S_ISREG((status := path.lstat()).st_mode) or status.st_size > MAX_BYTES:
            raise CorruptCheckpoint(f"{path}: expected a regular file of at most {MAX_BYTES} bytes")
        return read_bounded(path, MAX_BYTES).decode()
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: {error}") from None


def parse_manifest(path: Path, text: str) -> Manifest:
    """A manifest from its text; `path` is for errors.

    Raises CorruptCheckpoint, or ConfigError for another format.
    """
    try:
        body, seal, tail = text.rpartition(SEAL)
        if not seal or tail != hashlib.sha256(body.encode()).hexdigest() + '"}\n':
            raise CorruptCheckpoint(f"{path}: its SHA-256 differs from the one at its end")
        fields = json.loads(body + "}")
        version = fields.pop("format")
        if version not in (1, FORMAT):
            raise ConfigError(
                f"{path}: format {version!r} of another titanlite version; expected format 1 or {FORMAT}"
            )
        return _checked(fields, version)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptCheckpoint(
            f"{path}: invalid manifest ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _checked(fields: dict[str, Any], version: int) -> Manifest:
    """The fields as a Manifest. Raises ValueError, TypeError or KeyError if one is invalid."""
    files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
    for name, entry in files.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name) or name == NAME:
            raise ValueError(f"file name {name!r}")
        _require(
            _is_count(entry.size) and re.fullmatch("[0-9a-f]{64}", entry.sha256),
            f"file {name}: {entry}",
        )
    grids = {key: _grid(**grid) for key, grid in fields.pop("grids").items()} if version > 1 else {}
    room = {key: _room(grid, files) for key, grid in grids.items()}
    tensors = {}
    for name, entry in fields.pop("tensors").items():
        key = str(entry.pop("grid", ""))
        grid = grids[key] if version > 1 else _grid_of_chunks(entry["shape"], entry.pop("chunks"))
        _require(entry.keys() == {"dtype", "shape"}, f"tensor {name!r}: {', '.join(entry)}")
        _require(
            _are_counts(entry["shape"]) and list(grid.shape) == entry["shape"],
            f"tensor {name!r}: shape",
        )
        tensors[name] = TensorEntry(entry["dtype"], grid)
        size = math.prod(grid.shape) * DTYPES[entry["dtype"]].itemsize
        _require(
            size <= (room[key] if version > 1 else _room(grid, files)),
            f"tensor {name!r}: longer than its files",
        )
    manifest = Manifest(**fields, files=files, tensors=tensors)
    _require(_is_count(manifest.step) and isinstance(manifest.finite, bool), "step or finite")
    _require(_are_counts(manifest.layout.values()), "layout")
    _require(all(isinstance(section, dict) for section in manifest.config.values()), "config")
    texts = (manifest.created, manifest.torch, manifest.data, *manifest.tensors)
    _require(
        all(isinstance(text, str) and text.isprintable() for text in texts),
        "text with characters that are not printable",
    )
    loss = manifest.validation_loss
    _require(loss is None or (isinstance(loss, float) and math.isfinite(loss)), "validation_loss")
    return manifest


def _grid(edges: list[list[int]], files: list[str]) -> Grid:
    _require(len(edges) <= MAX_DIMS and all(map(_are_counts, edges)), "grids: edges")
    ascending = all(
        line[:1] == [0] and all(a < b for a, b in itertools.pairwise(line)) for line in edges
    )
    _require(ascending, "grids: edges do not ascend from 0")
    _require(math.prod(len(line) - 1 for line in edges) == len(files), f"grids: {len(files)} files")
    return Grid(tuple(map(tuple, edges)), tuple(files))


def _grid_of_chunks(shape: list[int], chunks: list[Any]) -> Grid:
    """The grid of a tensor in format 1."""
    boxes = [Box(file, tuple(offsets), tuple(sizes)) for file, offsets, sizes in chunks]
    _require(all(_are_counts((*box.offsets, *box.sizes)) for box in boxes), "chunks")
    return grid_of(shape, boxes)


def _room(grid: Grid, files: dict[str, FileEntry]) -> int:
    """Bytes of the files of a grid.

    Raises ValueError or KeyError if one is not a file of tensors.
    """
    names = {*grid.files}
    _require(
        all(name.endswith(".safetensors") for name in names),
        "grids: a file that is not of safetensors",
    )
    return sum(files[name].size for name in names)


def _are_counts(values: Iterable[Any]) -> bool:
    return all(map(_is_count, values))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


def file_problems(folder: Path, files: dict[str, FileEntry]) -> list[str]:
    """Files that are absent, of a wrong size, or not regular files. Reads no content."""
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
    """One of the small files.

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


def describe_os_error(path: Path, error: OSError) -> str:
    """The error as a problem of the checkpoint.

    Raises ConfigError if it is not one: no permission, a stale mount.
    """
    message = f"{path}: {error.strerror or error}"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP):
        raise ConfigError(f"{message}; the checkpoint itself may be intact") from None
    return message
