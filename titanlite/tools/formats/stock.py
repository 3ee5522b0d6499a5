"""Reads a stock DCP folder (`.metadata`, `*.distcp`), as torchtitan writes it; runs no code in it.

What it is: stock DCP unpickles the index and each non-tensor entry, which runs any code in them,
and reads tensors without checking their CRC. Here the index is read by `pickle_reader.py`, and
checked: each part of a tensor lies in a file of this folder (no link) and within the file's length,
and the parts of a tensor fill it exactly once.
Non-tensor entries are not read. A part is a file of torch.save within a file; its pickle is
compared with the sequence of instructions that torch.save writes for a tensor (`_TENSOR`), and its
bytes must have their CRC.
What it costs: about 0.02 ms per saved part (parameters, moments and processes multiply); only
`.metadata` is opened. Reading a part reads its bytes twice, the first time for the CRC.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickletools
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from titanlite.checkpoint.grid import Box, grid_of
from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.runtime.errors import ConfigError, shortened
from titanlite.tools.formats.full_state import FullTensor, Part, Record
from titanlite.tools.formats.pickle_reader import UnreadablePickle, UnsafeName, read_pickle
from titanlite.tools.formats.torch_file import STORAGES, Archive, Slice, require_room

ENVELOPE_BYTES = 1 << 20  # upper bound of what torch.save adds to a tensor; it adds 2 kB
DESCRIPTION_BYTES = 1 << 15  # upper bound of the archive's directory and the pickle, which are read
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
WAY_OUT = (
    "If you trust the folder's author: python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch FOLDER FILE.pt "
    "runs its code and writes a file that can be converted"
)


def is_stock_dcp(path: Path) -> bool:
    """Whether `torch.distributed.checkpoint` wrote the folder."""
    # Unlike Path's methods, False and no error for a name that is too long
    return os.path.lexists(path / ".metadata")


def read_folder(folder: Path) -> dict[str, FullTensor]:
    """The tensors of the folder by name; other entries are left out. Raises ConfigError."""
    path = folder / ".metadata"
    _regular_file(path)
    try:
        index = read_pickle(path)
    except UnsafeName as error:
        raise ConfigError(
            f"{path}: names {str(error)!r}, which is none of the classes and dtypes of a DCP "
            "index and could run "
            f"code; nothing was run. {WAY_OUT}"
        ) from None
    except UnreadablePickle as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}; expected the index that "
            "torch.distributed.checkpoint writes"
        ) from None
    files: dict[str, _File] = {}
    return {name: _tensor(folder, name, entry, files) for name, entry in index.items()}


@dataclasses.dataclass
class _File:
    """A file of the folder, and how much of it is left for other tensors."""

    path: Path
    length: int
    unassigned: int  # bytes that no part of a tensor has been found in yet


def _tensor(folder: Path, name: str, entry: list[Any], files: dict[str, _File]) -> FullTensor:
    """A tensor of the index, checked against its files. `files`: those seen so far.

    Raises ConfigError.
    """
    dtype = DTYPES.get(entry[0])
    shape = tuple(entry[1])
    chunks = entry[2]
    if dtype is None:
        raise ConfigError(
            f"{folder / '.metadata'}: {name[:200]!r} has the dtype {entry[0]}, which torch does "
            "not have"
        )
    boxes = [
        Box(file_name, tuple(offsets), tuple(sizes)) for offsets, sizes, file_name, *_ in chunks
    ]
    try:
        grid_of(shape, boxes)
    except ValueError:
        raise ConfigError(
            f"{folder / '.metadata'}: the {len(chunks)} parts of {name[:200]!r} do not make up "
            f"its shape {shape!r:.200}"
        ) from None
    parts = []
    for offsets, sizes, file_name, begin, length in chunks:
        if file_name not in files:
            total = _file_length(folder, file_name)
            files[file_name] = _File(folder / file_name, total, total)
        file = files[file_name]
        if not 0 <= begin <= begin + length <= file.length:
            raise ConfigError(
                f"{file.path}: has {file.length} bytes, and the index places {name[:200]!r} at "
                f"bytes {begin} to "
                f"{begin + length}; the file is truncated, or the index belongs to another folder"
            )
        file.unassigned -= length
        if file.unassigned < 0:
            raise ConfigError(f"{folder / '.metadata'}: parts of tensors overlap in {file_name!r}")
        nbytes = math.prod(sizes) * dtype.itemsize
        if not nbytes <= length <= nbytes + ENVELOPE_BYTES:
            raise ConfigError(
                f"{folder / '.metadata'}: a part of {name[:200]!r} has {nbytes} bytes, and the "
                f"index gives it {length}"
            )
        parts.append(
            StockPart(
                file.path, begin, tuple(offsets), tuple(sizes) or (1,), (), length, name, dtype
            )
        )
    return FullTensor(dtype, shape, tuple(parts))


def _file_length(folder: Path, name: str) -> int:
    leads_elsewhere = name in ("", ".", "..") or "/" in name or "\\" in name
    if leads_elsewhere or len(name) > 255 or not name.isprintable():
        raise ConfigError(
            f"{folder / '.metadata'}: names the file {name[:200]!r}; only files of the folder "
            "itself are read"
        )
    return _regular_file(folder / name)


def _regular_file(path: Path) -> int:
    """The length of a file that must be a regular one: links lead anywhere, pipes never end."""
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is not a regular file; links are not followed")
    return status.st_size


@dataclasses.dataclass(frozen=True)
class StockPart(Part):
    """A part of a tensor: an archive of torch.save within a file, from byte `begin` on."""

    length: int = 0  # bytes of the archive
    name: str = ""
    dtype: torch.dtype = torch.float32
    located: list[tuple[int, tuple[int, ...]]] = dataclasses.field(
        default_factory=list, compare=False
    )  # once checked

    def locate(self, file: BinaryIO) -> tuple[int, tuple[int, ...]]:
        """The byte where the tensor begins, and its strides. Raises CorruptCheckpoint."""
        if not self.located:
            try:
                self.located.append(_locate(file, self))
            except Exception as error:
                raise CorruptCheckpoint(
                    f"{self.file}: {self.name[:200]!r} cannot be read "
                    f"({shortened(str(error)) or type(error).__name__}); "
                    "expected one tensor as torch.save writes it"
                ) from None
        return self.located[0]


def _locate(file: BinaryIO, part: StockPart) -> tuple[int, tuple[int, ...]]:
    archive = Archive(Slice(file, part.begin, part.length, DESCRIPTION_BYTES))
    tensor = _described(archive.read("data.pkl", DESCRIPTION_BYTES))
    if tensor.dtype != part.dtype or (tensor.shape or (1,)) != part.sizes:
        raise ValueError(
            f"it is {tensor.dtype} of shape {tensor.shape}, and .metadata says "
            f"{part.dtype}, {part.sizes}"
        )
    begin, size, crc = archive.place(f"data/{tensor.storage}")
    if begin + size > part.length:
        raise ValueError("its storage ends after it")
    require_room(tensor.dtype, tensor.start, tensor.shape, tensor.strides, size)
    problem = Record(part.file, part.begin + begin, size, crc, part.name).problem()
    if problem:
        raise ValueError(problem)
    first_byte = part.begin + begin + tensor.start * tensor.dtype.itemsize
    return first_byte, tensor.strides or (1,)


# Instructions that say nothing about the tensor: the protocol's version, lengths, memory
_FRAMING = ("PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_SIZES = r"(?:MARK\n)?((?:INT \d+\n)*)(?:EMPTY_TUPLE|TUPLE\d?)\n"
_TENSOR = re.compile(
    r"GLOBAL torch._utils _rebuild_tensor_v2\nMARK\nMARK\nTEXT storage\nGLOBAL (torch \w+)\nTEXT "
    r"(\w+)\nTEXT \S+\n"
    rf"INT \d+\nTUPLE\nBINPERSID\nINT (\d+)\n{_SIZES}{_SIZES}NEW(?:FALSE|TRUE)\n"
    r"GLOBAL collections OrderedDict\nEMPTY_TUPLE\nREDUCE\nTUPLE\nREDUCE\nSTOP\n"
)


class _Tensor(NamedTuple):
    """A tensor as its pickle describes it."""

    dtype: torch.dtype
    storage: str  # its name in the archive
    start: int  # the index of the first number in the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _described(program: bytes) -> _Tensor:
    """Reads from a pickle which tensor it makes. Raises ValueError."""
    lines = ""  # an instruction and its argument in each
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in _FRAMING:
            continue
        instruction = opcode.name
        if isinstance(argument, int):
            instruction = f"INT {argument}"
        elif instruction.endswith("UNICODE"):
            instruction = f"TEXT {argument}"
        elif argument is not None:
            instruction = f"{instruction} {argument}"
        lines += f"{instruction}\n"
    match = _TENSOR.fullmatch(lines)
    dtype = STORAGES.get(match[1].replace(" ", ".")) if match else None
    if match is None or dtype is None:
        raise ValueError(
            f"expected one tensor of {', '.join(str(dtype) for dtype in STORAGES.values())}"
        )
    start = int(match[3])
    shape = tuple(int(size) for size in re.findall(r"\d+", match[4]))
    strides = tuple(int(stride) for stride in re.findall(r"\d+", match[5]))
    if len(shape) != len(strides) or max((start, *shape, *strides)) >= 1 << 62:
        raise ValueError("invalid shape, strides or offset")
    return _Tensor(dtype, match[2], start, shape, strides)
