"""manifest.json: the contents of a checkpoint, and the hashes that verify them.

What it is: format version, step, layout, config and origin of a checkpoint; size and SHA-256 of
each file; the grids by which tensors are cut; dtype, shape and grid of each tensor; and at the end
the SHA-256 of the manifest's own text. A flipped bit anywhere in the folder is detected: in a file
by the file's hash, in the manifest by its own.
Why it is JSON: reading JSON can only build numbers, strings, lists and mappings. The checkpoint may
come from an attacker, so every field, above all file names, is checked before it is used.
What it costs: a line for each file, grid and tensor.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.grid import MAX_DIMS, Grid
from titanlite.config.keys import schema_keys
from titanlite.config.values import expected_type, is_of_type
from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, reason_of, shortened
from titanlite.runtime.files import read_bounded

FORMAT = 3
NAME = "manifest.json"
MAX_BYTES = 1 << 25  # the parsed manifest takes up to 24 times as much memory
# Lists and tables: empty ones would take the most memory. Ours have at least 18 bytes each
MAX_NESTED = MAX_BYTES // 16
# Limits of the config, which are above what a TOML file of at most 256 kB can hold
MAX_SETTINGS = 1 << 18  # names and values
MAX_SETTINGS_TEXT = 1 << 22  # characters of all names and values
SETTINGS_LEVELS = 7  # nested levels: the config itself is the first, a weight of a phase the last
# safetensors' names of dtypes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SEAL = ',\n"sha256": "'

Settings = dict[str, dict[str, Any]]  # a config: section -> key -> value


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written: a file is absent, truncated or changed, or the
    manifest is invalid.
    """


class FileEntry(NamedTuple):
    size: int  # bytes
    sha256: str


class TensorEntry(NamedTuple):
    dtype: str  # as safetensors names it
    grid: Grid

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid.shape


class RunMetadata(NamedTuple):
    """The part of a manifest that the run supplies because it does not follow from the files."""

    layout: dict[str, int]  # axis -> degree
    config: Settings
    data: str  # fingerprint of the prepared data
    validation_loss: float | None = None  # at this step


@dataclass(frozen=True)
class Manifest:
    step: int
    finite: bool  # no NaN and no infinity in any tensor
    created: str  # ISO 8601, UTC
    torch: str
    layout: dict[str, int]  # axis -> degree
    config: Settings
    data: str  # fingerprint of the prepared data
    validation_loss: float | None  # at this step
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def degrees(self) -> str:
        """The layout as text, for example dp_shard=2 tp=4."""
        used = [f"{axis}={degree}" for axis, degree in self.layout.items() if degree > 1]
        return " ".join(used) or "one process"


def to_text(manifest: Manifest) -> str:
    """Writes the content of manifest.json, which ends with the SHA-256 of the text before it.

    Raises ValueError if it is too long.
    """
    grids: dict[Grid, int] = {}
    tensors = {}
    for name, entry in manifest.tensors.items():
        number = grids.setdefault(entry.grid, len(grids))
        tensors[name] = {"dtype": entry.dtype, "shape": entry.shape, "grid": number}
    blocks = {  # these have a line for each entry
        "config": manifest.config,
        "files": {name: entry._asdict() for name, entry in manifest.files.items()},
        "grids": {str(number): grid._asdict() for grid, number in grids.items()},
        "tensors": tensors,
    }
    lines = [f'"format": {FORMAT}']
    for name, value in vars(manifest).items():
        if name not in blocks:
            lines.append(_json_line(name, value))
    for name, entries in blocks.items():
        rows = [" " + _json_line(key, entry) for key, entry in entries.items()]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    body = "{\n" + ",\n".join(lines)
    if len(body) > MAX_BYTES - 100:
        raise ValueError(
            f"{NAME} would have {len(body)} bytes, of which at most {MAX_BYTES} can be read again"
        )
    return body + _sealing(body)


def _json_line(key: str, value: object) -> str:
    return f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"


def _sealing(body: str) -> str:
    """Builds the end of a manifest: the SHA-256 of the text before it."""
    return SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n'


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a step folder, but not the files that it names.

    Raises CorruptCheckpoint.
    """
    return parse_manifest(folder / NAME, read_text(folder / NAME))


def read_text(path: Path) -> str:
    """Reads the text of a manifest. Raises CorruptCheckpoint."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise CorruptCheckpoint(f"{path}: expected a regular file of at most {MAX_BYTES} bytes")
        return read_bounded(path, MAX_BYTES).decode()
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: {error}") from None


def describe_os_error(path: Path, error: OSError) -> str:
    """Describes an error as a problem of the checkpoint.

    Raises ConfigError if the cause lies outside of it: no permission, a stale mount.
    """
    message = f"{path}: {error.strerror or error}"
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP):
        raise ConfigError(f"{message}; the checkpoint itself may be intact") from None
    return message


def parse_manifest(path: Path, text: str) -> Manifest:
    """Parses a manifest; `path` is for errors.

    Raises CorruptCheckpoint, or ConfigError for another format.
    """
    try:
        body, seal, _ = text.rpartition(SEAL)
        if not seal or text != body + _sealing(body):
            raise CorruptCheckpoint(f"{path}: its SHA-256 differs from the one at its end")
        nested = body.count("[") + body.count("{")
        require(nested <= MAX_NESTED, f"{nested} lists and tables; at most {MAX_NESTED}")
        fields = parse_json(body + "}")
        version = fields.pop("format")
        if version != FORMAT:
            raise ConfigError(
                f"{path}: format {version!r} of another titanlite version; expected {FORMAT}"
            )
        return _checked(fields)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path}: invalid manifest ({reason_of(error)})") from None


# The functions below raise ValueError, TypeError, KeyError or AttributeError if a field is invalid.


def _checked(fields: dict[str, Any]) -> Manifest:
    """Builds a Manifest from checked fields."""
    files = _checked_files(fields.pop("files"))
    grids = {key: _checked_grid(**grid) for key, grid in fields.pop("grids").items()}
    tensors = _checked_tensors(fields.pop("tensors"), grids, files)
    manifest = Manifest(**fields, files=files, tensors=tensors)
    require(_is_count(manifest.step) and isinstance(manifest.finite, bool), "step or finite")
    require(_are_counts(manifest.layout.values()), "layout")
    _require_settings(manifest.config)
    texts = (
        manifest.created,
        manifest.torch,
        manifest.data,
        *manifest.layout,
        *manifest.tensors,
    )
    require(
        all(isinstance(text, str) and text.isprintable() for text in texts),
        "text with characters that are not printable",
    )
    loss = manifest.validation_loss
    require(loss is None or (isinstance(loss, float) and math.isfinite(loss)), "validation_loss")
    return manifest


def _require_settings(config: Settings) -> None:
    """Raises ValueError unless a config is as one of any version: sections of settings that are
    numbers, text or lists. A key need not be known, since it may have left since the save; the
    value of one that is known has its type.
    """
    require(type(config) is dict, "config")
    for section in config.values():
        require(type(section) is dict, "config: a section that is not a table")
        require(not any(type(value) is dict for value in section.values()), "config: no setting")
    level: list[object] = [config]
    count = 0
    length = 0
    for _ in range(SETTINGS_LEVELS):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += (*value.keys(), *value.values())
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str):
                length += len(value)
        count += len(inner)
        require(count <= MAX_SETTINGS and length <= MAX_SETTINGS_TEXT, "config: too long")
        level = inner
    require(not level, "config: too deep")
    for section_name, section in config.items():
        for name, value in section.items():
            key = schema_keys().get(f"{section_name}.{name}")
            if key is not None and not is_of_type(value, key):
                shown = shortened(json.dumps(value))
                raise ValueError(f"config: {key.name} = {shown}; expected {expected_type(key)}")


def _checked_files(entries: dict[str, dict[str, Any]]) -> dict[str, FileEntry]:
    files = {}
    for name, fields in entries.items():
        entry = FileEntry(**fields)
        # Neither a path, nor hidden, nor the manifest
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name) or name == NAME:
            raise ValueError(f"file name {name!r}")
        is_hash = re.fullmatch("[0-9a-f]{64}", entry.sha256) is not None
        require(_is_count(entry.size) and is_hash, f"file {name}: {entry}")
        files[name] = entry
    return files


def _checked_tensors(
    entries: dict[str, dict[str, Any]],
    grids: dict[str, Grid],
    files: dict[str, FileEntry],
) -> dict[str, TensorEntry]:
    # Computed once per grid, since many tensors share one
    bytes_of_grids = {key: _bytes_of_files(grid, files) for key, grid in grids.items()}
    tensors = {}
    for name, entry in entries.items():
        key = str(entry.pop("grid", ""))
        grid = grids[key]
        available = bytes_of_grids[key]
        require(entry.keys() == {"dtype", "shape"}, f"tensor {name!r}: {', '.join(entry)}")
        same_shape = _are_counts(entry["shape"]) and list(grid.shape) == entry["shape"]
        require(same_shape, f"tensor {name!r}: shape")
        tensors[name] = TensorEntry(entry["dtype"], grid)
        size = math.prod(grid.shape) * DTYPES[entry["dtype"]].itemsize
        require(size <= available, f"tensor {name!r}: longer than its files")
    return tensors


def _checked_grid(edges: list[list[int]], files: list[str]) -> Grid:
    require(len(edges) <= MAX_DIMS and all(map(_are_counts, edges)), "grids: edges")
    for starts in edges:
        ascending = all(a < b for a, b in itertools.pairwise(starts))
        require(starts[:1] == [0] and ascending, "grids: edges do not ascend from 0")
    num_cells = math.prod(len(starts) - 1 for starts in edges)
    # A file holds one part of a tensor, because it has the tensor's name
    require(num_cells == len(files) == len(set(files)), f"grids: {len(files)} files")
    return Grid(tuple(map(tuple, edges)), tuple(files))


def _bytes_of_files(grid: Grid, files: dict[str, FileEntry]) -> int:
    """Sums the bytes of a grid's files: an upper bound for its tensors."""
    names = set(grid.files)
    are_tensors = all(name.endswith(".safetensors") for name in names)
    require(are_tensors, "grids: a file that is not of safetensors")
    return sum(files[name].size for name in names)


def _are_counts(values: Iterable[object]) -> bool:
    return all(map(_is_count, values))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # not bool, which is an int too


def require(condition: bool, problem: str) -> None:
    """Raises ValueError with the problem unless the condition holds."""
    if not condition:
        raise ValueError(problem)
