"""manifest.json: the contents of a checkpoint, and the hashes that verify them.

What it is: format version, step, layout, config and origin of a checkpoint; size and SHA-256 of each file; shape, dtype
and place of each tensor; and at the end the SHA-256 of the manifest's own text. A flipped bit anywhere in the folder is
detected: in a file by the file's hash, in the manifest by its own.
Why it is JSON: reading JSON can only build numbers, strings, lists and mappings (`manifest_reader.py` checks them).
What it costs: a line for each file and tensor, and a few bytes for each chunk of a tensor.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.config.schema import ConfigError

FORMAT = 1
NAME = "manifest.json"
MAX_BYTES = 1 << 28  # most of it is needed by 512 processes of a 405B model; parsed, it takes 24 times as much memory
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
MAX_DIMS = 64  # torch's own limit
BLOCKS = ("config", "files", "tensors")  # the last fields, with a line for each entry
SEAL = ',\n"sha256": "'


class CorruptCheckpoint(ConfigError):
    """A checkpoint differs from what was written: a file is absent, truncated or changed, or its manifest invalid."""


class FileEntry(NamedTuple):
    size: int  # bytes
    sha256: str


class Chunk(NamedTuple):
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: list[int]
    sizes: list[int]


class TensorEntry(NamedTuple):
    dtype: str  # as safetensors names it
    shape: list[int]
    chunks: list[Chunk]

    def key(self, name: str, chunk: Chunk) -> str:
        """The chunk's name in its file: the tensor's name, followed by its range unless it is the whole tensor."""
        if chunk.sizes == self.shape:
            return name
        box = ", ".join(f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
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
        return " ".join(f"{axis}={degree}" for axis, degree in self.layout.items() if degree > 1) or "one process"


def to_text(manifest: Manifest) -> str:
    """The content of manifest.json, which ends with the SHA-256 of all text before it."""
    fields = {"format": FORMAT, **vars(manifest)}
    lines = []
    for name in sorted(fields, key=BLOCKS.__contains__):
        text = json.dumps(fields[name], allow_nan=False)
        if name in BLOCKS:
            entries = {key: it if name == "config" else it._asdict() for key, it in fields[name].items()}
            text = "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(it)}" for key, it in entries.items()) + "\n}"
        lines.append(f"{json.dumps(name)}: {text}")
    body = "{\n" + ",\n".join(lines)
    return body + SEAL + hashlib.sha256(body.encode()).hexdigest() + '"}\n'
