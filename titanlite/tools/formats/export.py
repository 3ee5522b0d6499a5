"""What of a checkpoint is written: which tensors, in which dtype and order of rows, as a stream of
row blocks.

What it is: `Export` holds an `Outgoing` for each tensor; its rows are read, converted and checked
for NaN and infinity when a writer asks for them, so that memory stays that of one block.
What it costs: one look at each number, beside reading and converting it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.checkpoint.shard_file import is_finite
from titanlite.tools.formats.full_state import FullState, FullTensor, half_split

SHARD_SIZE = 5_000_000_000  # bytes


class Outgoing(NamedTuple):
    """A tensor to write: `blocks()` reads and converts its rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Export:
    """A checkpoint to be written: `model` by parameter name, and `others` if `full`.

    `dtype` is that of the weights, None for the source's; `q8` is GGUF's q8_0. Moments and counts
    keep their dtype: a run resumes from them exactly. `nonfinite` collects the names of tensors
    with NaN or infinity as they are written; `progress` is called with the bytes of each block.
    """

    def __init__(
        self,
        state: FullState,
        dtype: torch.dtype | None,
        q8: bool = False,
        full: bool = False,
        shard_size: int = 0,
    ) -> None:
        self.state = state
        self.dtype = dtype
        self.q8 = q8
        self.full = full
        self.shard_size = shard_size or SHARD_SIZE
        self.nonfinite: set[str] = set()
        self.progress: Callable[[int], object] = lambda nbytes: None
        self.model = {name: self.weight(name) for name in state.tensors}
        others = state.others.items() if full else ()
        self.others = {
            name: self._outgoing(name, tensor, tensor.dtype, 0) for name, tensor in others
        }

    def weight(self, name: str, head_dim: int = 0) -> Outgoing:
        """A weight to write; with `head_dim`, its rows in Hugging Face's order."""
        tensor = self.state.tensors[name]
        return self._outgoing(name, tensor, self.dtype_of(tensor), head_dim)

    def dtype_of(self, tensor: FullTensor) -> torch.dtype:
        """The dtype that a weight is written in."""
        return self.dtype if self.dtype and tensor.dtype.is_floating_point else tensor.dtype

    def _outgoing(
        self, name: str, tensor: FullTensor, dtype: torch.dtype, head_dim: int
    ) -> Outgoing:
        def blocks() -> Iterator[Tensor]:
            for block in tensor.blocks(head_dim or 1):
                yield self.examine(
                    name, (half_split(block, head_dim) if head_dim else block).to(dtype)
                )

        return Outgoing(dtype, tensor.shape, blocks)

    def examine(self, name: str, block: Tensor) -> Tensor:
        """The block, after it was checked and counted: a number too large for fp16 becomes
        infinity, for example.
        """
        if not is_finite(block):
            self.nonfinite.add(name)
        self.progress(block.nbytes)
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written; for q8_0 an upper bound: 34 bytes for 32 numbers of 2 or
        4 bytes.
        """
        whole = sum(tensor.nbytes for tensor in (*self.model.values(), *self.others.values()))
        return whole * 34 // 64 if self.q8 else whole
