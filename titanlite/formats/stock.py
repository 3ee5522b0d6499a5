"""Reading a stock DCP folder (`.metadata` + `*.distcp`), as torchtitan writes it, without running code in it.

What it is: stock DCP unpickles the index and each non-tensor entry, which runs any code in them, and reads tensors
without checking their CRC. Here the index comes from `stock_index.py`, non-tensor entries are not read, and a tensor's
envelope (torch.save's zip: a pickle that names a storage, and its bytes) is read as data and its CRC is checked.
What it costs: reading a chunk reads its bytes twice, the first time for the CRC.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.formats.full_state import FullTensor, Part
from titanlite.formats.pickled import read_pickle
from titanlite.formats.stock_index import Place, read_index
from titanlite.formats.torch_file import NAMES, data_of, describe, require_room


def is_stock_dcp(path: Path) -> bool:
    """Whether `torch.distributed.checkpoint` wrote the folder."""
    return os.path.lexists(path / ".metadata")  # unlike Path's methods, False and no error for a name that is too long


def read_folder(folder: Path, trust_pickle: bool = False) -> dict[str, FullTensor]:
    """The tensors of the folder by name; other entries are left out. Raises ConfigError."""
    index = read_index(folder, trust_pickle)
    found = {}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        parts = []
        for chunk in entry.chunks:
            place = index.storage_data[MetadataIndex(name, chunk.offsets)]
            sizes = tuple(chunk.sizes) or (1,)
            file, offsets = folder / place.file, tuple(chunk.offsets)
            parts.append(StockPart(file, place.offset, offsets, sizes, (), place, name))
        found[name] = FullTensor(entry.properties.dtype, tuple(entry.size), tuple(parts))
    return found


NOWHERE = Place("", 0, 0, None, None)


@dataclasses.dataclass(frozen=True)
class StockPart(Part):
    """A chunk: an archive of torch.save with one tensor, within a file."""

    place: Place = NOWHERE
    name: str = ""
    located: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)  # once its CRC was checked

    def locate(self, file: BinaryIO) -> tuple[int, tuple[int, ...]]:
        if not self.located:
            try:
                self.located.append(_locate(file, self.place))
            except Exception as error:
                raise CorruptCheckpoint(
                    f"{self.file}: {self.name[:200]!r} cannot be read ({str(error)[:200] or type(error).__name__}); "
                    "expected one tensor as torch.save writes it"
                ) from None
        return self.located[0]


class _Slice(io.RawIOBase):
    """A range of a file's bytes as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        if self._at < 0:
            raise ValueError("it is cut short")
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        piece = self._file.read(left if count < 0 else min(count, left))
        self._at += len(piece)
        return piece


def _locate(file: BinaryIO, place: Place) -> tuple[int, tuple[int, ...]]:
    """The byte where the tensor begins, and its strides. Raises ValueError and what zipfile raises."""
    piece = _Slice(file, place.offset, place.length)
    with zipfile.ZipFile(piece) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > place.length for info in records.values()):
            raise ValueError("it is compressed")
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise ValueError("it was written on a big-endian machine")
        dtype, storage, start, shape, strides = describe(read_pickle(archive.read(records["data.pkl"]), NAMES))
        if dtype != place.dtype or shape != place.sizes:
            raise ValueError(f"it is {dtype} of shape {shape}, and .metadata says {place.dtype}, {place.sizes}")
        record = records[f"data/{storage}"]
    begin, size, crc = data_of(piece, record), record.file_size, 0
    require_room(dtype, start, shape, strides, min(size, place.length - begin))
    piece.seek(begin)
    while size:
        data = piece.read(min(size, 1 << 24))
        if not data:
            raise ValueError("it is cut short")
        crc, size = zlib.crc32(data, crc), size - len(data)
    if crc != record.CRC:
        raise ValueError("its CRC-32 is not the one it was written with")
    return place.offset + begin + start * dtype.itemsize, strides or (1,)
