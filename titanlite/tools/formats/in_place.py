"""Fills the tensors of a file that is laid out first, in any order of the tensors.

What it is: a file of safetensors or of torch.save gives each tensor a range of bytes. `fill` takes
blocks of the tensors and appends each to its tensor's range, so that the output is written once.
What it costs: one block in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from titanlite.checkpoint.shard_file import bytes_of, start_writeback
from titanlite.tools.formats.export import Outgoing


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


def blocks_of(tensors: Mapping[str, Outgoing]) -> Iterator[tuple[str, Tensor]]:
    """Reads and converts all tensors, one after the other."""
    for name, tensor in tensors.items():
        for block in tensor.blocks():
            yield name, block
