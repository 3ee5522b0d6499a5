"""`recompute.offload`: keeps the inputs of recomputed blocks in CPU memory until the backward.

What it is: with `recompute.mode = full` a block keeps only its input, (B, S, D), for the backward.
Here that is copied to pinned CPU memory in the forward, and back when the backward reaches the
block, so that no block's activations stay on the GPU between them. It uses autograd's hooks for
saved tensors, as torch's `save_on_cpu` does, with two differences: only the block's input moves,
not weights or the RoPE table, and the host does not wait.
Why it is here: the inputs of all blocks are what remains of the activations with `full`, and grow
with depth and sequence.
What it costs: b B S D bytes per block, local batch and direction (b per number). The copy to the
CPU has a separate stream, so it overlaps with the block's computation; the copy back runs in the
computation's stream and delays it. docs/precision.md compares the two times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Offloaded(NamedTuple):
    """A copy in CPU memory, and on CUDA the event at which it is complete."""

    copy: Tensor
    complete: torch.cuda.Event | None


def offload_input(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a forward that `checkpoint` recomputes, and keeps its first argument in CPU memory."""
    return functools.partial(_call, forward)


def _call(
    forward: Callable[..., Tensor], x: Tensor, *arguments: object, **options: object
) -> Tensor:
    # The hooks live until the backward: they must not refer to `x`, or it would stay on the GPU
    address = x.data_ptr()
    device = x.device

    def pack(tensor: Tensor) -> Tensor | Offloaded:
        return to_cpu(tensor) if tensor.data_ptr() == address else tensor

    def unpack(packed: Tensor | Offloaded) -> Tensor:
        return packed if isinstance(packed, Tensor) else to_device(packed, device)

    # `checkpoint` sets its own hooks inside these, so these see only what it saves: the input.
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(x, *arguments, **options)


def to_cpu(tensor: Tensor) -> Offloaded:
    """Starts a copy to CPU memory; the tensor may be freed at once."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    if not tensor.is_cuda:
        return Offloaded(copy.copy_(tensor), complete=None)
    stream = _copy_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)  # its memory is not used again before the copy is complete
    return Offloaded(copy, complete=stream.record_event())


def to_device(offloaded: Offloaded, device: torch.device) -> Tensor:
    """Copies the tensor back to the device; the host does not wait."""
    if offloaded.complete is not None:
        torch.cuda.current_stream(device).wait_event(offloaded.complete)
    return offloaded.copy.to(device, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
