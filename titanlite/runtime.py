"""The process: device, process group, garbage collection, and how it ends.

What it is: what a training process needs from its surroundings before any model exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
import os
import random
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config import EXIT_STOPPED, ConfigError

logger = logging.getLogger("titanlite")


def device_type(name: str) -> str:
    """What `run.device` means here: cuda or cpu. Raises ConfigError for cuda where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda: torch finds no CUDA device; allowed: auto, cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def backend(type: str) -> str:
    """The process group's backend. gloo beside NCCL, for what is in CPU memory: offloaded parameters, objects."""
    return "cpu:gloo,cuda:nccl" if type == "cuda" else "gloo"


def start(device_name: str, timeout_seconds: int, seed: int) -> torch.device:
    """Joins the process group (NCCL on CUDA, gloo on CPU) and returns this process's device.

    Under torchrun the environment says who takes part; alone, the process is a world of one. A caller that has
    already initialised a process group keeps it. Every process gets the same seed: what differs between them is
    the data they read, never a random number.
    """
    type = device_type(device_name)
    device = torch.device("cpu")
    if type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives kept for the watchdog's report
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_seconds)}
        if type == "cuda":
            options["device_id"] = device
        if "RANK" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend(type), **options)
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


def one_ahead(batches: Iterable[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
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


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: reserved by the allocator on CUDA, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def from_rank0(find: Callable[[], Any]) -> Any:
    """What `find` returns on rank 0, on all: on a network file system not all see a new folder at once.

    Raises ConfigError on all where it does there.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except ConfigError as error:
            found[1] = error.problems
    dist.broadcast_object_list(found)
    if found[1]:
        raise ConfigError(found[1])
    return found[0]


def require_agreement(**facts: str) -> None:
    """Raises ConfigError on all processes unless each of them holds the same facts (name -> value or hash)."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, facts)
    if problems := [
        f"rank {rank} has another {name} than rank 0: nodes need the same command, data, Python version, folder, and "
        "processors for which `auto` means the same"
        for rank, other in enumerate(found)
        for name in facts
        if other[name] != found[0][name]
    ]:
        raise ConfigError(problems)


def of_any_process(text: str) -> str:
    """What some process says; empty where none says anything. All call it together and get the same."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    found: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return next((f"rank {rank}: {said}" for rank, said in enumerate(found) if said), "")


def claim_folder(folder: Path) -> Any:
    """Makes the run's folder and locks it; the lock lasts as long as the object returned.

    Raises ConfigError on all processes where it cannot be written, another run holds it, or some process sees
    another folder of that name (checkpoints need one that all nodes share).
    """
    claim: list[Any] = [None, ""]  # a token that only this run knows, or what is wrong
    held = None
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = lock(folder / ".lock")
            held.truncate(0)
            held.write(token := secrets.token_hex(8))
            held.flush()
            claim[0] = token
        except BlockingIOError:
            claim[1] = f"{folder}: another process is training here; wait for it or choose another run.name"
        except OSError as error:
            claim[1] = (
                f"run.folder, run.name: {folder}: {error.strerror or error}; expected a folder that can be written"
            )
    dist.broadcast_object_list(claim)
    if claim[1]:
        raise ConfigError(claim[1])
    require_agreement(folder=_read_token(folder / ".lock", claim[0]))
    return held


def lock(path: Path) -> Any:
    """Locks a file, making it if need be, for as long as the object returned lives. Raises BlockingIOError."""
    file = path.open("a+")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _read_token(path: Path, token: str) -> str:
    """The file's content; a network file system gets ten seconds to show the one expected."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError):
            if (content := path.read_text()) == token or time.monotonic() > deadline:
                return content
        if time.monotonic() > deadline:
            return "absent"
        time.sleep(0.1)


class GarbageCollection:
    """Collects every `freq` steps on all processes alike, instead of whenever Python likes on any of them.

    One process that pauses to collect makes all others wait. 0 leaves Python's collector on.
    """

    def __init__(self, freq: int) -> None:
        self.freq, self.frozen = freq, False
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        if not self.freq:
            return
        if not self.frozen:
            gc.collect()
            gc.freeze()  # what the set-up and the first step leave behind stays: no later collection looks at it
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
