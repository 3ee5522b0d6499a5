"""Staging: a copy of the state in host memory, from which a checkpoint is written.

What it is: a tensor in CPU memory is copied by numpy. From a GPU the state comes in pieces, through
a few pinned buffers: each belongs to a thread, which copies a piece into it on its own CUDA stream,
waits until the piece has arrived, and moves it into ordinary memory. While one thread waits for the
GPU, other threads move their pieces.
Why it is here: a GPU writes into pinned memory at the speed of the bus, and into ordinary memory at
a fraction of it. Pinned memory cannot be swapped out or used for anything else, so only the buffers
are pinned.
What it costs: the copy, and 128 MB of pinned memory (CUDA only).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.state import State

# Number of pinned buffers, and bytes per buffer
BUFFERS = 4
PIECE = 32 << 20


class Staging:
    """Copies states to the host, one at a time."""

    def __init__(self, device: torch.device, keep: bool) -> None:
        """`keep`: reuse the memory of a copy for the next one; otherwise it is freed with the
        copy.
        """
        self.device = device
        self.keep = keep
        self._memories: dict[str, Tensor] = {}  # with `keep`: name -> copy
        self._threads = ThreadPoolExecutor(BUFFERS, "staging")
        self._of_thread = threading.local()  # each thread's stream and buffer

    def copy(self, state: State, also_host: bool, ready: torch.cuda.Event | None) -> State:
        """Copies the state to CPU memory; the copy is complete when this returns.

        `also_host`: also copy tensors that are already in CPU memory. `ready`: on CUDA, the
        event after which the state is valid. Raises RuntimeError if a tensor is not contiguous, or
        if there is no memory.
        """
        moving: list[Future[None]] = []
        copies: State = {}
        for part, values in state.items():
            copies[part] = {}
            for name, value in values.items():
                if not (_on_gpu(value) or also_host):
                    copies[part][name] = value
                    continue
                copy = self._memory(f"{part}.{name}", value)
                copies[part][name] = copy
                source = _bytes(value)
                target = _bytes(copy)
                if not _on_gpu(value):
                    # numpy, because torch would start a second OpenMP team for this thread
                    np.copyto(target.numpy(), source.numpy())
                    continue
                for piece, place in zip(source.split(PIECE), target.split(PIECE), strict=True):
                    moving.append(self._threads.submit(self._move, piece, place, ready))
        for future in moving:
            future.result()
        return copies

    def _memory(self, key: str, value: Tensor) -> Tensor:
        """Returns CPU memory for a copy of a tensor; for a DTensor, a DTensor."""
        if key in self._memories:
            return self._memories[key]
        memory = torch.empty_like(value, device="cpu")
        if self.keep:
            self._memories[key] = memory
        return memory

    def _move(self, source: Tensor, target: Tensor, ready: torch.cuda.Event | None) -> None:
        """Copies one piece from the GPU through the calling thread's pinned buffer."""
        thread = self._of_thread
        if not hasattr(thread, "buffer"):
            torch.cuda.set_device(self.device)
            thread.stream = torch.cuda.Stream(self.device)
            thread.buffer = _pinned(PIECE)
        piece = thread.buffer[: len(source)]
        with torch.cuda.stream(thread.stream):
            assert ready is not None, "recorded on CUDA"
            thread.stream.wait_event(ready)
            piece.copy_(source, non_blocking=True)
        thread.stream.synchronize()
        np.copyto(target.numpy(), piece.numpy())


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _bytes(tensor: Tensor) -> Tensor:
    """Views this rank's part of a tensor as a row of bytes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().view(-1).view(torch.uint8)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
