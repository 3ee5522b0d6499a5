"""Reads and converts the tensors that `convert` writes, a block of rows at a time.

What it is: `Options` are the choices of the user. `Export` holds an `Outgoing` for each tensor; its
rows are read, converted and checked for NaN and infinity when a writer asks for them, so that
memory stays that of one block, or of one expert's matrix.
What it costs: one look at each number, beside reading and converting it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.checkpoint.shard_file import is_finite
from titanlite.tools.formats.full_state import FullState, FullTensor, half_split
from titanlite.tools.formats.selection import Selection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARD_SIZE = 5_000_000_000  # bytes


@dataclass(frozen=True)
class Options(Selection):
    """Which weights `convert` reads from its source, and how it writes its target."""

    to: str = ""  # a name in `targets.TARGETS`; empty: by the target's suffix
    dtype: str = ""  # of the weights: bf16, fp16, fp32; empty: the source's
    full: bool = False  # also optimizer and training state
    shard_size: int = 0  # bytes per file of a format with several; 0: SHARD_SIZE
    names: str = ""  # of dcp: whose names of the parameters; empty: those of torchtitan 0.3
    verify: bool = True  # compare the output with the source
    allow_nonfinite: bool = False  # write NaN and infinity


class Outgoing(NamedTuple):
    """A tensor to write: `blocks()` reads and converts its rows.

    `stored`: the source's tensor, if its elements are written in the same order; `converted`
    converts any of them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]
    stored: FullTensor | None = None
    converted: Callable[[Tensor], Tensor] = lambda elements: elements

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def zeros(numel: int) -> Outgoing:
    """A vector of zeros in fp32, which another program has and titanlite does not."""

    def blocks() -> Iterator[Tensor]:
        yield torch.zeros(numel)

    return Outgoing(torch.float32, (numel,), blocks)


def text(content: bytes) -> Outgoing:
    """Bytes as a vector."""

    def blocks() -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return Outgoing(torch.uint8, (len(content),), blocks)


class Export:
    """A checkpoint to be written: `model` by parameter name, and `others` with `--full`.

    Moments and counts keep their dtype: a run resumes from them exactly. `nonfinite` collects the
    names of tensors with NaN or infinity as they are written; `progress` is called with the bytes
    of each block.
    """

    def __init__(self, state: FullState, options: Options) -> None:
        self.state = state
        self.dtype = DTYPES.get(options.dtype)  # None: the source's
        self.full = options.full
        self.names = options.names
        self.shard_size = options.shard_size or SHARD_SIZE
        self.hashes: dict[Path, str] = {}  # of the source's files that are not verified yet
        self.nonfinite: set[str] = set()
        self.progress: Callable[[int], object] = lambda nbytes: None
        self.model = {name: self.weight(name) for name in state.tensors}
        self.others: dict[str, Outgoing] = {}
        if options.full:
            for name in state.others:
                self.others[name] = self.training(name)

    def training(self, name: str, head_dim: int = 0) -> Outgoing:
        """Training state to write in its own dtype; with `head_dim` as in `weight`."""
        tensor = self.state.others[name]
        return self._outgoing(name, tensor, tensor.dtype, head_dim)

    def weight(self, name: str, head_dim: int = 0) -> Outgoing:
        """A weight to write; with `head_dim`, its rows in Hugging Face's order."""
        tensor = self.state.tensors[name]
        return self._outgoing(name, tensor, self.dtype_of(tensor), head_dim)

    def expert(self, name: str, number: int) -> Outgoing:
        """One expert's matrix of a weight (E, F, D)."""
        tensor = self.state.tensors[name]
        dtype = self.dtype_of(tensor)

        def blocks() -> Iterator[Tensor]:
            yield self._examine(name, tensor.read(number, number + 1)[0].to(dtype))

        return Outgoing(dtype, tensor.shape[1:], blocks)

    def dtype_of(self, tensor: FullTensor) -> torch.dtype:
        """The dtype that a weight is written in."""
        return self.dtype if self.dtype and tensor.dtype.is_floating_point else tensor.dtype

    def _outgoing(
        self, name: str, tensor: FullTensor, dtype: torch.dtype, head_dim: int
    ) -> Outgoing:
        def converted(elements: Tensor) -> Tensor:
            return self._examine(name, elements.to(dtype))

        def blocks() -> Iterator[Tensor]:
            for block in tensor.blocks(head_dim or 1):
                yield converted(half_split(block, head_dim) if head_dim else block)

        stored = None if head_dim else tensor
        return Outgoing(dtype, tensor.shape, blocks, stored, converted)

    def _examine(self, name: str, block: Tensor) -> Tensor:
        """Returns the block after checking and counting it.

        It is checked as it is written: a number too large for fp16 becomes infinity, for example.
        """
        if not is_finite(block):
            self.nonfinite.add(name)
        self.progress(block.nbytes)
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.others.values()))
