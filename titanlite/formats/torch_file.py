"""Reading files of `torch.save`: which tensors lie where in them, without running code from the file.

What it is: an uncompressed zip archive: `data.pkl` describes a tree of dicts in which tensors are (storage, offset,
shape, strides), and `data/<n>` are the storages. The description is read as data (`pickled.py`), the numbers later and
from their place in the file.
What it costs: only `data.pkl` is read here.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.config.schema import ConfigError
from titanlite.formats.full_state import FullTensor, Part
from titanlite.formats.pickled import Made, Name, Pairs, UnsafeName, read_pickle

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
NAMES = {  # that torch.save writes for trees of tensors and numbers
    "torch._utils._rebuild_tensor_v2": "storage, offset, shape, strides",
    "torch._utils._rebuild_parameter": "a tensor and its requires_grad",
    "collections.OrderedDict": "a dict, as a module's state_dict() is one",
    **dict.fromkeys(STORAGES, "a tensor's dtype"),
}
LARGEST_PICKLE = 1 << 28  # bytes
Tree = dict[str, Any]  # of dicts, FullTensors, numbers, strings, lists


def data_of(file: BinaryIO | io.RawIOBase, info: zipfile.ZipInfo) -> int:
    """The byte of the file where a stored record's content begins: after its header, name and padding."""
    file.seek(info.header_offset)
    header = file.read(30) or b""
    if header[:4] != b"PK\x03\x04":
        raise ValueError("a record is not where the archive says")
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def read_tree(path: Path) -> Tree:
    """The saved tree, with a FullTensor for each tensor; keys are strings. Raises ConfigError or CorruptCheckpoint."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in records.values()):
                raise ValueError("it is compressed")
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise ValueError("it was written on a big-endian machine")
            if records["data.pkl"].file_size > LARGEST_PICKLE:
                raise ValueError(f"its description has more than {LARGEST_PICKLE} bytes")
            made = read_pickle(archive.read(records["data.pkl"]), NAMES)
            storages = {
                name.removeprefix("data/"): (data_of(file, info), info.file_size)
                for name, info in records.items()
                if name.startswith("data/")
            }
            length = path.stat().st_size
            if any(begin + size > length for begin, size in storages.values()):
                raise ValueError("a storage ends after the file")
            tree = _grown(made, path, storages)
    except UnsafeName as error:
        if (name := str(error)).startswith("torch.") and name.endswith(("Storage", "_rebuild_tensor_v3")):
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGES.values())
            raise ConfigError(f"{path}: holds a tensor of another dtype ({name}); allowed: {known}") from None
        raise ConfigError(
            f"{path}: names {str(error)!r}, which is not needed for tensors and numbers and could run code; nothing "
            "was run. Save the model's state_dict() with torch.save, or as safetensors"
        ) from None
    except ConfigError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            f"{path}: cannot be read ({str(error)[:200] or type(error).__name__}); expected a file of torch.save"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; expected a dict of tensors")
    return tree


def _grown(made: Any, path: Path, storages: dict[str, tuple[int, int]], depth: int = 0) -> Any:
    """The plain data of a pickle as a tree of dicts and lists."""
    if depth > 100:
        raise ValueError("it is nested too deep")
    if type(made) is Made and made.name == "torch._utils._rebuild_parameter":
        made = made.arguments[0]
    if type(made) is Made:
        return _tensor(made, path, storages)
    if type(made) is Pairs:
        if any(type(key) not in (str, int) for key, _ in made):
            raise ValueError("a key that is neither text nor a number")
        return {str(key): _grown(value, path, storages, depth + 1) for key, value in made}
    if type(made) in (list, tuple):
        return [_grown(value, path, storages, depth + 1) for value in made]
    if isinstance(made, Name):
        raise ValueError(f"{made} where a value was expected")
    return made


def _tensor(made: Made, path: Path, storages: dict[str, tuple[int, int]]) -> FullTensor:
    dtype, storage, start, shape, strides = describe(made)
    begin, size = storages[storage]
    require_room(dtype, start, shape, strides, size)
    part = Part(path, begin + start * dtype.itemsize, (0,) * len(shape), shape or (1,), strides or (1,))
    return FullTensor(dtype, shape, (part,))


def require_room(dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
    """Raises ValueError where a tensor goes beyond the `size` bytes of its storage."""
    last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > size:
        raise ValueError("a tensor that goes beyond its storage")


def describe(made: Any) -> tuple[torch.dtype, str, int, tuple[int, ...], tuple[int, ...]]:
    """dtype, storage name, index of the first number in the storage, shape and strides of a tensor's pickle.

    Raises ValueError.
    """
    if type(made) is not Made or made.name != "torch._utils._rebuild_tensor_v2" or made.state is not None:
        raise ValueError("it is no tensor")
    stored, start, shape, strides, *_ = made.arguments
    if type(stored) is not Made or stored.name != "persistent" or len(stored.arguments) != 5:
        raise ValueError("its storage is elsewhere")
    _, kind, name, _, _ = stored.arguments
    if (
        type(kind) is not Name or kind not in STORAGES or type(name) is not str
    ):  # a Name only: hashing others can overflow the stack
        raise ValueError(f"it is no tensor of a known dtype: {', '.join(str(dtype) for dtype in STORAGES.values())}")
    numbers = (start, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("its shape makes no sense")
    return STORAGES[kind], name, start, tuple(shape), tuple(strides)
