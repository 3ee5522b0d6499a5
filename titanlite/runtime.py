"""The process: device, process group, signals, garbage collection, and how it ends.

What it is: what a training process needs from its surroundings before any model exists.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import signal
import sys
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config import EXIT_STOPPED, ConfigError

logger = logging.getLogger("titanlite")


def start(device_name: str, timeout_seconds: int, seed: int) -> torch.device:
    """Joins the process group (NCCL on CUDA, gloo on CPU) and returns this process's device.

    Under torchrun the environment says who takes part; alone, the process is a world of one. A caller that has
    already initialised a process group keeps it. Every process gets the same seed: what differs between them is
    the data they read, never a random number.
    """
    type = ("cuda" if torch.cuda.is_available() else "cpu") if device_name == "auto" else device_name
    if type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda: torch finds no CUDA device; allowed: auto, cpu")
    device = torch.device("cpu")
    if type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_seconds)
        backend = "nccl" if type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    random.seed(seed)
    torch.manual_seed(seed)
    return device


def finish(code: int) -> NoReturn:
    """Ends the process at once. gloo's threads can abort an orderly interpreter exit (pytorch#190489)."""
    logging.shutdown()
    if dist.is_initialized() and code in (0, EXIT_STOPPED):  # after an error the others may never come to this
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. On CUDA through pinned memory, so the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: reserved by the allocator on CUDA, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class StopFlag:
    """Set by SIGINT or SIGTERM on any process, seen by all after the same step. A second signal kills at once."""

    def __init__(self) -> None:
        self.requested = False  # agreed by all processes
        self._seen = False  # by this process
        # A CPU group: asking every step must not wait for the GPU.
        self._group: Any = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen = True  # no message from here: the signal may have interrupted another one
        self.restore()

    def restore(self) -> None:
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self) -> bool:
        """Whether any process was signalled: one small all-reduce, called by all after each step."""
        flag = torch.tensor(int(self._seen))
        if self._group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        self.requested = bool(flag)
        if self.requested:
            logger.info("asked to stop: saving, then leaving (a second signal leaves at once)")
        return self.requested


class GarbageCollection:
    """Collects every `freq` steps on all processes alike, instead of whenever Python likes on any of them.

    One process that pauses to collect makes all others wait. 0 leaves Python's collector on.
    """

    def __init__(self, freq: int) -> None:
        self.freq = freq
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        if not self.freq:
            return
        if step == 1:
            gc.freeze()  # what the set-up left behind stays: no later collection looks at it
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
