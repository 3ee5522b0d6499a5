"""manifest.json: the contents of a checkpoint, and the hashes that verify them.

What it is: format version, step, layout, config and origin of a checkpoint; size and SHA-256 of
each file; the grids by which tensors are cut; dtype, shape and grid of each tensor; and at the end
the SHA-256 of the manifest's own text. A flipped bit anywhere in the folder is detected: in a file
by the file's hash, in the manifest by its own.
Why it is JSON: reading JSON can only build numbers, strings, lists and mappings
(`manifest_reader.py` checks them).
What it costs: a line for each file, grid and tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.grid import Grid
from titanlite.runtime.errors import ConfigError

FORMAT = 2
NAME = "manifest.json"
MAX_BYTES = 1 << 25  # parsed, it takes up to 24 times as much memory
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
}  # as safetensors names them
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SEAL = ',\n"sha256": "'


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written: a file is absent, truncated or changed, or its
    manifest invalid.
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


def part_key(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of a tensor's part in its file: the tensor's, followed by the range unless it is the
    whole tensor.
    """
    if tuple(sizes) == tuple(shape):
        return name
    box = ", ".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))
    return f"{name}[{box}]"


class RunMetadata(NamedTuple):
    """The part of a manifest that the run supplies, and that does not follow from the files."""

    layout: dict[str, int]  # axis -> degree
    config: dict[str, dict[str, Any]]  # section -> key -> value
    data: str  # fingerprint of the prepared data
    validation_loss: float | None = None  # at this step


@dataclass(frozen=True)
class Manifest:
    step: int
    finite: bool  # no NaN and no infinity in any tensor
    created: str  # ISO 8601, UTC
    torch: str
    layout: dict[str, int]  # axis -> degree
    config: dict[str, dict[str, Any]]  # section -> key -> value
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
        """The layout as text: dp_shard=2 tp=4."""
        return (
            " ".join(f"{axis}={degree}" for axis, degree in self.layout.items() if degree > 1)
            or "one process"
        )


def to_text(manifest: Manifest) -> str:
    """The content of manifest.json, ended by the SHA-256 of all text before.

    Raises ValueError if it is too long.
    """
    grids: dict[Grid, int] = {}
    tensors = {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "grid": grids.setdefault(entry.grid, len(grids)),
        }
        for name, entry in manifest.tensors.items()
    }
    blocks = {  # these have a line for each entry
        "config": manifest.config,
        "files": {name: entry._asdict() for name, entry in manifest.files.items()},
        "grids": {str(number): grid._asdict() for grid, number in grids.items()},
        "tensors": tensors,
    }
    fields = {
        "format": FORMAT,
        **{name: value for name, value in vars(manifest).items() if name not in blocks},
    }
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in fields.items()
    ]
    for name, entries in blocks.items():
        rows = (
            f" {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}"
            for key, entry in entries.items()
        )
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    body = "{\n" + ",\n".join(lines)
    if len(body) > MAX_BYTES - 100:
        raise ValueError(
            f"{NAME} would have {len(body)} bytes, of which at most {MAX_BYTES} can be read again"
        )
    return body + SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n'
