"""Asynchronous checkpointing: training continues while a checkpoint is written.

What it is: a save in two parts. Staging copies the state into host memory during the next forward
and backward, which read parameters and optimizer state but do not change them; the loop waits for
the copy before the optimizer step. Then a thread calls `dcp.save` with the copy, in a
separate process group. At most one save is in progress.

    disabled   the loop waits for the whole save; on CUDA the state is first copied to the host
    async      copies into memory that is kept for the next save

A tensor in CPU memory is copied by numpy. From a GPU the state comes in pieces, through a few
pinned buffers: each belongs to a thread, which copies a piece into it on its own CUDA stream, waits
until the piece has arrived, and moves it into ordinary memory. While one thread waits for the GPU,
other threads move their pieces. A GPU writes into pinned memory at the speed of the bus, and into
ordinary memory at a fraction of it; but pinned memory cannot be swapped out or used for anything
else, so only the buffers are pinned.
Why not `dcp.async_save` with its `DefaultStager`: that pins a copy of the whole state (96 GB for
8B parameters on one GPU, where four buffers of 32 MB suffice) or copies while training waits, and
it tries once, while here a failed save is repeated from the same copy and training continues. And
its thread waits for the copy before it joins the other ranks: if one rank cannot copy, the others
would wait for it in the save.
What it costs: a copy of this process's part of the state in host memory: 12 bytes per parameter,
over all processes; on CUDA also 128 MB of pinned memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.state import State, state_of
from titanlite.checkpoint.storage import SaveError
from titanlite.runtime.phases import Phase, mark_phase

logger = logging.getLogger("titanlite")
# The Stateful objects, or if they were staged, copies of their state; the error of staging
Write = Callable[[Mapping[str, Any], "Exception | None"], None]
MAX_RETRY_SECONDS = 30  # the longest pause between two attempts

# Number of pinned buffers, and bytes per buffer
BUFFERS = 4
PIECE = 32 << 20


class AsyncSaver:
    """Stages state and passes it to a function that writes it.

    All processes call each method together.
    """

    def __init__(self, mode: str, retries: int, device: torch.device) -> None:
        self.retries = retries
        self.background = mode != "disabled"
        self.on_gpu = device.type == "cuda"
        self.staging: Staging | None = None
        if self.background or self.on_gpu:  # otherwise DCP writes from the tensors themselves
            self.staging = Staging(device, keep=self.background)
        self.waited = 0.0  # seconds that training has waited for the save in progress
        self._threads = ThreadPoolExecutor(1, "save")
        self._copying = False
        self._staged = threading.Event()
        self._future: Future[None] | None = None
        self._later: Future[None] | None = None

    def save(self, parts: Mapping[str, Stateful], write: Write) -> None:
        """Waits for the previous save, then calls `write(parts, None)`; after staging,
        `write(copies, failure)`.

        If saving is asynchronous, a thread calls `write`, and this method returns at once.
        """
        started = time.monotonic()
        self.wait()
        self.waited = 0.0
        if self.staging is None:
            self._write(parts, write, None)
            return
        state = state_of(parts)
        ready = None
        if self.on_gpu:  # the last update may still be running
            ready = torch.cuda.current_stream().record_event()
        if self.background:
            self._copying = True
            self._staged.clear()
            self._future = self._threads.submit(self._save, self.staging, state, write, ready)
            self.waited += time.monotonic() - started
        else:
            mark_phase(Phase.COPY_STATE)
            self._save(self.staging, state, write, ready)

    def wait_for_staging(self) -> None:
        """Returns when the state may change. The loop calls it before each optimizer step."""
        if not self._copying:
            return
        started = time.monotonic()
        mark_phase(Phase.WAIT_FOR_STAGING)
        self._staged.wait()
        self._copying = False
        self.waited += time.monotonic() - started
        mark_phase(Phase.UPDATE)

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed on this process; `wait` raises its error."""
        if self._future is None or not self._future.done():
            return False
        return self._future.exception() is not None

    def after_save(self, function: Callable[[], None]) -> None:
        """Calls a function once the save in progress has succeeded; in its thread if asynchronous.

        If the save fails, the function is not called, and `wait` raises the error.
        """
        if self.background:
            self._later = self._threads.submit(self._call_after, self._future, function)
        else:
            function()

    def _call_after(self, save: Future[None] | None, function: Callable[[], None]) -> None:
        """Calls the function unless `save` has failed; it has ended, since there is one thread."""
        if save is None or save.exception() is None:
            function()

    def wait(self) -> None:
        """Returns when no save is in progress. Raises SaveError on all processes if it failed."""
        futures = (self._future, self._later)
        self._future = None
        self._later = None
        for future in futures:
            if future is not None:
                future.result()

    @torch.no_grad()  # with gradients, `DTensor.to_local` takes a call of Python for autograd
    def _save(
        self, staging: Staging, state: State, write: Write, ready: torch.cuda.Event | None
    ) -> None:
        """Stages the state, then writes the copies."""
        copies: State = {}
        failure: Exception | None = None
        try:
            copies = staging.copy(state, self.background, ready)
        except Exception as error:  # for example no memory; `write` raises it on all processes
            failure = error
        finally:
            self._staged.set()  # also after an error, because the loop waits for it
        if not self.background:
            mark_phase(Phase.SAVE)
        self._write(copies, write, failure)

    def _write(self, state: Mapping[str, Any], write: Write, failure: Exception | None) -> None:
        for attempt in range(self.retries + 1):
            try:
                write(state, failure)
                return
            except SaveError as error:
                # Raised on all processes, so all of them repeat the save or none does
                if attempt == self.retries:
                    raise
                pause = min(2**attempt, MAX_RETRY_SECONDS)
                if dist.get_rank() == 0:
                    count = f"{attempt + 1} of {self.retries}"
                    logger.warning(f"{error}; trying again in {pause} s ({count})")
                time.sleep(pause)


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
        copies: State = {}
        pairs: list[tuple[Tensor, Tensor]] = []  # of bytes, to read and to write
        for part, values in state.items():
            copies[part] = {}
            for name, value in values.items():
                if not (_on_gpu(value) or also_host):
                    copies[part][name] = value
                    continue
                copy = self._memory(f"{part}.{name}", value)
                copies[part][name] = copy
                pairs.append((_bytes(value), _bytes(copy)))
        moving: list[Future[None]] = []
        try:
            for source, target in pairs:
                if not _on_gpu(source):
                    # numpy, because torch would start a second OpenMP team for this thread
                    np.copyto(target.numpy(), source.numpy())
                    continue
                for piece, place in zip(source.split(PIECE), target.split(PIECE), strict=True):
                    moving.append(self._threads.submit(self._move, piece, place, ready))
        finally:
            wait(moving)  # all, also after an error: then the state may change
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
