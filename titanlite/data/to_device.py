"""What moves batches to the device, beside the computation.

What it is: pinned copies on a CUDA stream of their own; on CPU nothing moves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. On CUDA through pinned memory, so the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def prefetch(batches: Iterable[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """The batches on the device. On CUDA the next is copied while the caller computes with this one.

    Copies have a stream of their own, so the computation waits for none but its own. The first batch of a step is
    copied while the device still computes the step before: the host waits for that only where it logs.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = _copy_stream(device)

    def on_the_way(batch: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        with torch.cuda.stream(copies):
            return None if batch is None else tuple(to_device(tensor, device) for tensor in batch)

    rest = iter(batches)
    coming = on_the_way(next(rest, None))
    while coming is not None:
        here, computing = coming, torch.cuda.current_stream(device)
        computing.wait_stream(copies)
        for tensor in here:
            tensor.record_stream(computing)  # its memory is the copies' stream's: not to be used again too soon
        coming = on_the_way(next(rest, None))
        yield here


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
