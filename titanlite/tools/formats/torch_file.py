"""Reading files of `torch.save`: which tensors lie where in them, without running code from the
file.

What it is: an uncompressed zip archive: `data.pkl` describes a tree of dicts in which tensors are
(storage, offset, shape, strides), and `data/<n>` are the storages, each with a CRC-32.
`pickle_reader.py` reads the description.
What it costs: only `data.pkl` and the archive's directory are read here. `Record.problem` reads a
storage for its CRC.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.full_state import FullTensor, Part, Record
from titanlite.tools.formats.pickle_reader import UnreadablePickle, UnsafeName, read_pickle

STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
Tree = dict[str, Any]  # of dicts, FullTensors, numbers and strings


def read_tree(path: Path) -> tuple[Tree, list[Record]]:
    """The saved tree, with a FullTensor for each tensor, and its storages.

    Raises ConfigError or CorruptCheckpoint.
    """
    try:
        answer = read_pickle("torch", path)
        length = path.stat().st_size
        storages = {
            name: Record(path, begin, size, crc, name)
            for name, (begin, size, crc) in answer["storages"].items()
        }
        if any(record.begin + record.length > length for record in storages.values()):
            raise UnreadablePickle("a storage ends after the file, which is truncated")
        if sum(record.length for record in storages.values()) > length:
            raise UnreadablePickle("storages overlap")
        return _tree(answer["tree"], storages), list(storages.values())
    except UnsafeName as error:
        name = str(error)
        if name.startswith("torch.") and name.endswith(("Storage", "_rebuild_tensor_v3")):
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGES.values())
            raise ConfigError(
                f"{path}: holds a tensor of another dtype ({name}); allowed: {known}"
            ) from None
        raise ConfigError(
            f"{path}: names {name!r}, which is not needed for tensors and numbers and could run "
            "code; nothing "
            "was run. Save the model's state_dict() with torch.save, or as safetensors"
        ) from None
    except UnreadablePickle as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error}") from None


def _tree(value: Any, storages: dict[str, Record]) -> Any:
    """A value of `read_torch`, with a FullTensor for each tensor."""
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _tree(item, storages) for key, item in value["dict"].items()}
    kind, name, start, shape, strides = value["tensor"]
    if kind not in STORAGES or name not in storages:
        raise UnreadablePickle(
            f"a tensor is in storage {name[:100]!r} of type {kind}, which the file does not have"
        )
    dtype = STORAGES[kind]
    record = storages[name]
    require_room(dtype, start, shape, strides, record.length)
    begin = record.begin + start * dtype.itemsize
    origin = (0,) * len(shape)
    part = Part(record.file, begin, origin, tuple(shape) or (1,), tuple(strides) or (1,))
    return FullTensor(dtype, tuple(shape), (part,))


def require_room(
    dtype: torch.dtype, start: int, shape: Sequence[int], strides: Sequence[int], size: int
) -> None:
    """Raises UnreadablePickle where a tensor is not within its storage of `size` bytes, or its
    elements share bytes.
    """
    if math.prod(length or 1 for length in shape) >= 1 << 62:
        raise UnreadablePickle("a shape that no tensor can have")
    last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if (start if 0 in shape else last + 1) * dtype.itemsize > size:
        raise UnreadablePickle("a tensor goes beyond its storage")
    if math.prod(shape) * dtype.itemsize > size:
        raise UnreadablePickle(
            "a tensor has more elements than its storage; save tensor.contiguous()"
        )
