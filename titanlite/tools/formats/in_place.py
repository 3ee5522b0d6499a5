"""Fills the tensors of a file that is laid out first, in the order in which the source has them.

What it is: a file of safetensors or of torch.save gives each tensor a range of bytes. `fill` takes
blocks of the tensors and appends each to its tensor's range, so the output is written once.
`blocks_of` reads a step folder's files in the order of their bytes, so each is read once too, its
SHA-256 included. A tensor whose rows lie there in another order is read again.
What it costs: two buffers of 4 MB; the hash takes a thread.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import CorruptCheckpoint, describe_os_error
from titanlite.checkpoint.shard_file import bytes_of, start_writeback
from titanlite.tools.formats.export import Outgoing
from titanlite.tools.formats.full_state import BLOCK, FullTensor, Part, read_exactly
from titanlite.tools.formats.intact import other_steps

NOTHING: Mapping[Path, str] = MappingProxyType({})


class Region:
    """A range of a file, written from its first byte to its last."""

    def __init__(self, descriptor: int, begin: int) -> None:
        self.descriptor = descriptor
        self.at = begin

    def append(self, data: memoryview) -> None:
        """Writes the next bytes. Raises OSError."""
        while len(data):  # a call may write only a part
            size = os.pwrite(self.descriptor, data, self.at)
            start_writeback(self.descriptor, self.at, size)
            self.at += size
            data = data[size:]


def fill(
    regions: Mapping[str, Region],
    blocks: Iterable[tuple[str, Tensor]],
    written: Callable[[str, memoryview], None] = lambda name, data: None,
) -> None:
    """Writes blocks, each with its tensor's name; those of one tensor come in their order.

    `written` is called with the bytes of each block.
    """
    for name, block in blocks:
        data = bytes_of(block.contiguous())
        regions[name].append(data)
        written(name, data)


def blocks_of(
    tensors: Mapping[str, Outgoing], hashes: Mapping[Path, str] = NOTHING
) -> Iterator[tuple[str, Tensor]]:
    """Reads and converts all tensors, one after the other.

    `hashes`: SHA-256 of files of the source, if these are not verified yet. Each is read once, from
    its first byte to its last, and hashed meanwhile. Raises CorruptCheckpoint at its end.
    """
    runs: dict[Path, list[_Run]] = {path: [] for path in hashes}
    begun: set[Part] = set()  # a tensor may be written twice
    in_order: set[str] = set()
    for name, tensor in tensors.items():
        if not tensor.stored or not hashes:
            continue
        parts = _parts_in_order(tensor.stored)
        if parts and begun.isdisjoint(parts):
            for part in parts:
                runs[part.file].append(_Run(part, tensor.stored, name, tensor))
            begun.update(parts)
            in_order.add(name)
    for path in sorted(hashes):
        yield from _hashed_blocks(path, hashes[path], runs[path])
    for name, tensor in tensors.items():
        if name not in in_order:
            for block in tensor.blocks():
                yield name, block


class _Run(NamedTuple):
    """Bytes of a source file that follow each other in the output too."""

    part: Part
    stored: FullTensor
    name: str
    tensor: Outgoing


def _parts_in_order(tensor: FullTensor) -> list[Part]:
    """The parts in the order of the files; none if the tensor's rows have another order."""
    parts = sorted(tensor.parts, key=lambda part: (part.file, part.begin))
    row = 0
    for part in parts:
        if (*part.offsets, 0)[0] != row or part.sizes[1:] != tensor.shape[1:]:
            return []
        row += part.sizes[0]
    return parts


def _hashed_blocks(path: Path, sha256: str, runs: list[_Run]) -> Iterator[tuple[str, Tensor]]:
    digest = hashlib.sha256()
    buffers = (memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK)))
    hashing: list[Future[None]] = []
    try:
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as thread:
            pieces = _pieces(runs, os.fstat(file.fileno()).st_size)
            for number, (size, run) in enumerate(pieces):
                if number > 1:
                    hashing[number - 2].result()  # its buffer is free again
                data = buffers[number % 2][:size]
                read_exactly(file, data)
                hashing.append(thread.submit(digest.update, data))
                if run:
                    elements = torch.frombuffer(data, dtype=run.stored.dtype)
                    yield run.name, run.tensor.converted(elements)
    except OSError as error:
        raise CorruptCheckpoint(describe_os_error(path, error)) from None
    if digest.hexdigest() != sha256:
        problem = f"{path}: its SHA-256 is not the one in the manifest"
        raise CorruptCheckpoint([problem, other_steps(path.parent)])


def _pieces(runs: list[_Run], size: int) -> Iterator[tuple[int, _Run | None]]:
    """Cuts a file into pieces of at most a block: those of the runs, and what is between them."""
    end = 0
    for run in sorted(runs, key=lambda run: run.part.begin):
        assert run.part.begin >= end, "a header of safetensors has no tensors that share bytes"
        yield from _cut(run.part.begin - end, None)
        length = math.prod(run.part.sizes) * run.stored.dtype.itemsize
        yield from _cut(length, run)
        end = run.part.begin + length
    yield from _cut(size - end, None)


def _cut(length: int, run: _Run | None) -> Iterator[tuple[int, _Run | None]]:
    for start in range(0, length, BLOCK):
        yield min(BLOCK, length - start), run
