"""Copies batches to the device while it computes.

What it is: on CUDA, copies from pinned memory on a separate stream; on the CPU nothing is copied.
Why it is here: the host waits for no copy, and each batch is copied while the device computes with
the previous one.
What it costs: one more batch of token ids in device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from titanlite.data.rows import Batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device, unless it is there.

    On CUDA it is copied from pinned memory, so the host does not wait.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def prefetch(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields batches on the device; on CUDA the next is copied while it computes with this one.

    Copies run on a separate stream, and the computation waits only for its own batch. The first
    batch of a step is copied while the device still computes the step before, unless that step was
    logged: then the host has waited.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch.apply(lambda tensor: tensor.to(device))
        return
    copies = _copy_stream(device)

    def start_copy(batch: Batch | None) -> Batch | None:
        if batch is None:
            return None
        with torch.cuda.stream(copies):
            return batch.apply(lambda tensor: to_device(tensor, device))

    remaining = iter(batches)
    following = start_copy(next(remaining, None))
    while following is not None:
        current = following
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copies)
        for tensor in current:
            if tensor is not None:
                # The copy stream allocated it, and must not reuse it before the computation ends
                tensor.record_stream(computing)
        following = start_copy(next(remaining, None))
        yield current


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
