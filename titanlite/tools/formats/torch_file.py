"""Finds the tensors in a file of `torch.save`, without running code from the file.

What it is: an uncompressed zip archive. `data.pkl` is a pickle of a tree of dicts, in which a
tensor is (storage, offset, shape, strides); `data/<n>` are the storages, each with a CRC-32.
`torch.load(weights_only=True, map_location="meta")` makes the tree, from a copy of the archive in
memory whose storages are empty. `Part` reads the tensors from the file itself.
Why it is here: torch.load only calls functions on a list, but sets no limits and compares no CRC.
Its list has more than tensors need, such as bytearray: a file of 100 bytes could allocate
gigabytes. And on meta an archive with a storage alignment of 0 ends the process (torch 2.13). So
torch gets nothing but the pickle, after its CRC and its instructions have been checked
(`require_safe`).
What it costs: 0.2 s for 1,000 tensors; only `data.pkl` and the archive's directory are read.
`Record.problem` reads a storage for its CRC.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError, reason_of
from titanlite.tools.formats.full_state import FullTensor, Part, Record
from titanlite.tools.torch_private import checkpoint_offset

# Upper bounds of what is read besides tensors
DESCRIPTION = 1 << 24  # bytes of the archive's directory, headers and pickle
LARGEST = 1 << 21  # bytes of the pickle; a tensor takes about 140
MOST_VALUES = 1000  # in a tuple; the state of Python's random generator has 627

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
# Names that a pickle may have: those of dicts of tensors, and what is often beside them. All are on
# the list of torch.load too.
ENCODE = "_codecs.encode"  # makes bytes
NAMES = re.compile(
    r"torch\._utils\._rebuild_(tensor_v2|parameter|parameter_with_state)|collections\.OrderedDict"
    rf"|{'|'.join(map(re.escape, (*STORAGES, ENCODE)))}|(__builtin__|builtins)\.set"
    r"|torch\.(Size|device|bool|(bfloat|complex|float|u?int)\d[a-z0-9_]*)"
)
Tree = dict[str, Any]  # of dicts, FullTensors, numbers and strings


def read_tree(path: Path) -> tuple[Tree, list[Record]]:
    """Reads the saved tree, with a FullTensor for each tensor, and its storages.

    Raises ConfigError or CorruptCheckpoint.
    """
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            archive = Archive(Slice(file, 0, length, DESCRIPTION))
            program = archive.read("data.pkl", LARGEST)
            records = _storages(path, archive, length)
        require_safe(path, program)
        return _load(program, records), records
    except (ConfigError, OSError):
        raise
    except Exception as error:  # whatever it is, the file is the cause
        raise CorruptCheckpoint(f"{path}: cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The cause in one sentence, without torch's advice to load without weights_only."""
    text = reason_of(error)
    if isinstance(error, pickle.UnpicklingError):
        text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return re.split(r"\.\s|\n", text)[0][:300] or type(error).__name__


class Slice(io.RawIOBase):
    """A range of a file as a file; reading more than `most` bytes of it raises ValueError."""

    def __init__(self, file: BinaryIO, start: int, length: int, most: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0
        self._most = most
        self._unread = most

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}
        self._at = origins[whence] + offset
        if self._at < 0:
            raise ValueError("it is truncated")
        return self._at

    def read(self, count: int = -1) -> bytes:
        to_the_end = max(0, self._length - self._at)
        if count < 0 or count > to_the_end:
            count = to_the_end
        self._unread -= count
        if self._unread < 0:
            raise ValueError(f"its description has more than {self._most} bytes")
        self._file.seek(self._start + self._at)
        piece = self._file.read(count)
        self._at += len(piece)
        return piece


class Archive:
    """The records of a file of torch.save by their names without the folder."""

    def __init__(self, file: Slice) -> None:
        """Reads the archive's directory. Raises ValueError and what zipfile raises."""
        with zipfile.ZipFile(file) as archive:
            listed = archive.infolist()
        self.records = {info.filename.partition("/")[2]: info for info in listed}
        self._file = file
        if len(self.records) < len(listed):
            raise ValueError("it has two records of the same name")
        if any(info.compress_type != zipfile.ZIP_STORED for info in listed):
            raise ValueError("it is compressed")
        if "byteorder" in self.records and self.read("byteorder", 6) != b"little":
            raise ValueError("it was written on a big-endian machine")

    def place(self, name: str) -> tuple[int, int, int | None]:
        """First byte, bytes and CRC-32 of a record's content; the CRC is None if it was written
        without.
        """
        if name not in self.records:
            raise ValueError(f"it has no {name}")
        info = self.records[name]
        self._file.seek(info.header_offset)
        header = self._file.read(30)  # the content begins after it, the name and the extra field
        if header[:4] != b"PK\x03\x04":
            raise ValueError("its zip directory has a wrong position of a record")
        name_length = int.from_bytes(header[26:28], "little")
        extra_length = int.from_bytes(header[28:30], "little")  # torch pads with an extra field
        begin = info.header_offset + 30 + name_length + extra_length
        # 0 with torch.serialization.skip_data and set_crc32_options
        return begin, info.file_size, info.CRC or None

    def read(self, name: str, most: int) -> bytes:
        begin, length, crc = self.place(name)
        if length > most:
            raise ValueError(f"its {name} has more than {most} bytes")
        self._file.seek(begin)
        content = self._file.read(length)
        if crc is not None and zlib.crc32(content) != crc:
            raise ValueError(f"the CRC-32 of its {name} is not the one it was written with")
        return content


def _storages(path: Path, archive: Archive, length: int) -> list[Record]:
    records = [
        Record(path, *archive.place(name), name.removeprefix("data/"))
        for name in archive.records
        if name.startswith("data/")
    ]
    if any(record.begin + record.length > length for record in records):
        raise ValueError("a storage ends after the file, which is truncated")
    if sum(record.length for record in records) > length:
        raise ValueError("storages overlap")
    return records


def _load(program: bytes, records: list[Record]) -> Tree:
    """Makes the tree that a checked pickle describes."""
    storages: dict[int, Record] = {}  # by the byte of the copy where they would begin
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as copy:
        copy.writestr("copy/version", "3")
        copy.writestr("copy/data.pkl", program)
        for record in records:
            copy.writestr(f"copy/data/{record.name}", b"")
            storages[buffer.tell()] = record
    buffer.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another version of the pickle protocol
        loaded = torch.load(buffer, map_location="meta", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError("it holds no dict; expected a dict of tensors, such as a state_dict()")
    return _Converter(storages, len(program)).convert(loaded)


_NESTS = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ")


def require_safe(path: Path, program: bytes) -> None:
    """Raises ConfigError if a pickle refers to a name that is not on the list, ValueError if it
    makes too large a tuple. Nothing is called.

    Tuples that each hold the next one twice are small in a pickle, and take years to hash as a key
    of a dict. So values are counted, shared ones each time. Lists and dicts have no hash and count
    as one. Bytes count as the most: some encoders double them, and so may not be given them again.
    """
    stack: list[int] = []  # for each value, how many values are in it
    marks: list[int] = []  # lengths of the stack
    memo: dict[int, int] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.proto > 2:
            raise ValueError(
                f"its pickle has protocol {opcode.proto}; torch.load reads torch.save's default, 2"
            )
        if opcode.name == "MARK":
            marks.append(len(stack))
            continue
        if opcode.name.endswith("PUT"):
            memo[argument] = stack[-1]
            continue
        taken = len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:
            taken = len(stack) - marks.pop() + opcode.stack_before.index(pickletools.markobject)
        values = stack[len(stack) - taken :]
        del stack[len(stack) - taken :]
        size = 1
        if opcode.name == "GLOBAL":
            name = argument.replace(" ", ".")
            _require_known(path, name)
            size = MOST_VALUES if name == ENCODE else 1
        elif opcode.name.endswith("GET"):
            size = memo[argument]
        elif opcode.name in _NESTS:
            size += sum(values)
            if opcode.name.startswith("TUPLE") and size > MOST_VALUES:
                raise ValueError(f"a tuple in it has more than {MOST_VALUES} values, or bytes")
        stack += [size] * len(opcode.stack_after)


def _require_known(path: Path, name: str) -> None:
    if NAMES.fullmatch(name):
        return
    if name.startswith("torch.") and name.endswith(("Storage", "_rebuild_tensor_v3")):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGES.values())
        raise ConfigError(f"{path}: holds a tensor of another dtype ({name}); allowed: {known}")
    shown = name if len(name) < 100 else name[:100] + "..."
    raise ConfigError(
        f"{path}: names {shown!r}, which is not needed for tensors and numbers and could run code; "
        "nothing was run. Save the model's state_dict() with torch.save, or as safetensors"
    )


class _Converter:
    """Makes plain dicts with FullTensors of what torch.load returns."""

    def __init__(self, storages: dict[int, Record], most: int) -> None:
        self._storages = storages
        self._left = most + 10_000  # values; of shared parts more could be made than memory holds

    def convert(self, value: Any, depth: int = 0) -> Any:
        """Keeps numbers and text; all else becomes None, also a dict with keys of other types."""
        self._left -= 1 + (len(value) // 8 if type(value) is str else 0)
        if self._left < 0:
            raise ValueError("with shared parts written out, it would be longer than the file")
        if depth > 100:
            raise ValueError("it is nested too deep")
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            same = [key for key in value if type(key) is int and str(key) in value]
            if same:
                raise ValueError(f"a dict has both {same[0]} and '{same[0]}' as keys")
            self._left -= sum(len(key) // 8 for key in value if type(key) is str)
            return {str(key): self.convert(item, depth + 1) for key, item in value.items()}
        return value if type(value) in (str, int, float, bool) else None

    def _tensor(self, saved: Tensor) -> FullTensor:
        tensor = saved.data  # without attributes: a file can set those of a parameter
        if tensor.is_neg():  # the sign of its numbers is changed when they are used
            raise ValueError("a tensor has the negative bit; save tensor.resolve_neg().clone()")
        record = self._storages[checkpoint_offset(tensor)]
        shape = tuple(tensor.shape)
        strides = tensor.stride()
        start = int(tensor.storage_offset())
        require_room(tensor.dtype, start, shape, strides, record.length)
        begin = record.begin + start * tensor.dtype.itemsize
        part = Part(record.file, begin, (0,) * len(shape), shape or (1,), strides or (1,))
        return FullTensor(tensor.dtype, shape, (part,))


def require_room(
    dtype: torch.dtype, start: int, shape: Sequence[int], strides: Sequence[int], size: int
) -> None:
    """Raises ValueError where a tensor is not within its storage of `size` bytes, or its elements
    share bytes.
    """
    if len(shape) > 64 or math.prod(length or 1 for length in shape) >= 1 << 62:
        raise ValueError("a shape that no tensor can have")
    last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if (start if 0 in shape else last + 1) * dtype.itemsize > size:
        raise ValueError("a tensor goes beyond its storage")
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError("a tensor has more elements than its storage; save tensor.contiguous()")
