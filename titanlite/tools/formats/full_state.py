"""A checkpoint of any format as a lazy mapping: `name -> Tensor`, read on access.

What it is: an index. In every format that titanlite reads, a tensor consists of boxes; each begins
at a byte of a file and is contiguous or has strides (`Part`). A format's reader makes this index
and a description of the model (`About`). Names, order of rows and shapes are titanlite's, so users
of the mapping need not know the format.
What it costs: nothing until a tensor is read, then its bytes, or one block of rows at a time
(`blocks`). Files are read and not mapped: a source that is truncated meanwhile is an error, where a
mapped one would end the process.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.errors import ConfigError, reason_of

# Step and trained length, beside weights whose format has no field for them
ORIGIN = "titanlite.json"
# Bytes of rows read at a time; the allocator reuses memory of this size and returns larger pieces
BLOCK = 1 << 22


def read_exactly(file: FileIO, data: memoryview) -> None:
    """Fills `data` from an unbuffered file. Raises CorruptCheckpoint if it is too short."""
    while len(data):
        size = file.readinto(data)
        if not size:
            raise CorruptCheckpoint(
                f"{file.name}: ends {len(data)} bytes before a tensor does; it is cut short"
            )
        data = data[size:]


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and the byte of a file where it begins."""

    file: Path
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] = ()  # in elements; empty: contiguous

    @property
    def is_transposed(self) -> bool:
        """Whether each row is spread over the whole box in the file."""
        return len(self.strides) > 1 and self.strides[0] < max(self.strides)

    def locate(self, file: BinaryIO) -> tuple[int, tuple[int, ...]]:
        """Returns `begin` and `strides`; a subclass may need the open file to know them."""
        return self.begin, self.strides

    def read(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the box. Raises CorruptCheckpoint if the file is too short."""
        shape = (stop - start, *self.sizes[1:])
        if 0 in shape:  # whatever its other dimensions and strides are
            return torch.empty(shape, dtype=dtype)
        try:
            with self.file.open("rb", buffering=0) as file:
                begin, strides = self.locate(file)
                strides = strides or tuple(
                    math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))
                )
                span = 1 + sum(
                    (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
                )
                row = span - max(0, shape[0] - 1) * strides[0]
                # Most of it lies between the rows
                if shape[0] > 1 and strides[0] > 8 * row + BLOCK // 64:
                    return torch.cat(
                        [self._one_row(begin, strides, dtype, i) for i in range(start, stop)]
                    )
                values = torch.empty(span, dtype=dtype)
                view = values.view(torch.uint8).numpy().data
                file.seek(begin + start * strides[0] * dtype.itemsize)
                read_exactly(file, view)
        except OSError as error:
            raise CorruptCheckpoint(f"{self.file}: {error.strerror or error}") from None
        return values.as_strided(shape, strides)

    def _one_row(
        self, begin: int, strides: tuple[int, ...], dtype: torch.dtype, row: int
    ) -> Tensor:
        at = begin + row * strides[0] * dtype.itemsize
        inner = Part(self.file, at, (), self.sizes[1:] or (1,), strides[1:] or (1,))
        return inner.read(dtype, 0, inner.sizes[0]).reshape(1, *self.sizes[1:])


@dataclass(frozen=True)
class FullTensor:
    """A whole tensor that consists of one or several parts.

    `half_split`: the head width if its rows lie in Hugging Face's order, else 0.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    half_split: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (of the first dimension) from `start` to `stop`, by default all.

        Raises CorruptCheckpoint.
        """
        if not self.shape:
            return self.parts[0].read(self.dtype, 0, 1)[0]
        stop = self.shape[0] if stop is None else stop
        width = self.half_split
        if not width:
            return self._read(start, stop)
        first = start // width * width
        last = -(-stop // width) * width
        return interleave(self._read(first, last), width)[start - first : stop - first]

    def _read(self, start: int, stop: int) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].read(self.dtype, start, stop)
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for part in self.parts:
            top = part.offsets[0]
            height = part.sizes[0]
            first = max(start, top)
            last = min(stop, top + height)
            if first < last:
                sides = zip(part.offsets[1:], part.sizes[1:], strict=True)
                place = tuple(slice(side, side + size) for side, size in sides)
                rows[(slice(first - start, last - start), *place)] = part.read(
                    self.dtype, first - top, last - top
                )
        return rows

    def row_ranges(self, multiple: int = 1) -> list[tuple[int, int | None]]:
        """Ranges of rows of about 4 MB; each but the last has a multiple of `multiple` rows."""
        if not self.shape or not self.nbytes or any(part.is_transposed for part in self.parts):
            return [(0, None)]
        step = math.lcm(multiple, self.half_split or 1)
        rows = max(step, BLOCK // (self.nbytes // self.shape[0]) // step * step)
        return [
            (start, min(start + rows, self.shape[0])) for start in range(0, self.shape[0], rows)
        ]

    def blocks(self, multiple: int = 1) -> Iterator[Tensor]:
        """All rows in order, as `row_ranges` cuts them."""
        return (self.read(start, stop) for start, stop in self.row_ranges(multiple))


def same_numbers(a: FullTensor, b: FullTensor) -> bool:
    """Whether two tensors are equal; reads up to the first difference."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.nbytes:
        return False
    return all(torch.equal(x, y) for x, y in zip(a.blocks(), b.blocks(), strict=True))


def half_split(rows: Tensor, width: int) -> Tensor:
    """Permutes rows of wq or wk into Hugging Face's order: of each head the even, then the odd.

    RoPE rotates pairs of rows: (2i, 2i + 1) in Meta's code and here, (i, i + width / 2) in theirs.
    rows: (heads * width, D).
    """
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleave(rows: Tensor, width: int) -> Tensor:
    """Permutes rows back: the inverse of `half_split`."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


@dataclass
class About:
    """What is known of a checkpoint beside its tensors. Fields that its format does not have are
    None or empty.
    """

    format: str
    model: LlamaConfig | None = None
    tokenizer: bytes | None = None  # `Tokenizer.content`
    step: int | None = None
    seq_len: int = 0
    layout: str = ""
    finite: bool | None = None
    config: dict[str, dict[str, Any]] = field(default_factory=dict)  # the resolved configuration
    data: str = ""  # fingerprint of the prepared data
    files: dict[str, bytes] = field(default_factory=dict)  # small files of a step folder
    averaged: bool = False  # whether the weights are the average of those of the run


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turns what wrong contents of a file raise into a CorruptCheckpoint: the file is not `what`.

    A ConfigError stays as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CorruptCheckpoint(f"{path}: not {what} ({reason_of(error)})") from None


class Record(NamedTuple):
    """Bytes of a file and their CRC-32, which is None if the file was saved without."""

    file: Path
    begin: int
    length: int
    crc: int | None
    name: str

    def problem(self, progress: Callable[[int], object] | None = None) -> str:
        """Says what is wrong with the bytes; "" if nothing is.

        `progress` is called with the number of bytes of each block.
        """
        if self.crc is None:  # nothing to compare
            return ""
        crc = 0
        unread = self.length
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.begin)
                while unread:
                    block = file.read(min(unread, BLOCK))
                    if not block:
                        return "it is truncated"
                    crc = zlib.crc32(block, crc)
                    unread -= len(block)
                    if progress:
                        progress(len(block))
        except OSError as error:
            return error.strerror or str(error)
        if crc != self.crc:
            return "its CRC-32 is not the one it was written with"
        return ""


class FullState(Mapping[str, Tensor]):
    """A lazy mapping from parameter name to tensor, in titanlite's names and order of rows.

    `others`: training state beside the model (`optimizer.state.<parameter>.exp_avg`, ...).
    `records`: the storages of files of torch.save, with their CRC-32.
    """

    def __init__(
        self,
        path: Path,
        about: About,
        tensors: dict[str, FullTensor],
        others: dict[str, FullTensor] | None = None,
    ) -> None:
        self.path = path
        self.about = about
        self.tensors = tensors
        self.others = others or {}
        self.records: list[Record] = []
        self.sources: list[FullState] = []  # a model and its adapters, if this is their sum

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def nbytes(self, full: bool = False) -> int:
        """Bytes of the model, or of everything."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        if full:
            total += sum(tensor.nbytes for tensor in self.others.values())
        return total

    @property
    def model(self) -> LlamaConfig:
        """The model's shape. Raises ConfigError if the files do not hold it."""
        if self.about.model is None:
            if self.about.format == "titanlite":
                raise CorruptCheckpoint(f"{self.path / 'model.json'}: not in the manifest")
            raise ConfigError(
                f"{self.path} ({self.about.format}) holds no model shape; give --model, a flavor "
                "or the path of a "
                "model.json"
            )
        return self.about.model
