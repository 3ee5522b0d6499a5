"""A training process: its device, the process group it joins, its garbage collection, and its end.

What it is: the set-up of a process before the model is built: backend, device and random seed.
What it costs: one rendezvous at the start.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titanlite.config.schema import EXIT_STOPPED, ConfigError
from titanlite.distributed.watchdog import mark_phase


def device_type(name: str) -> str:
    """Resolves `run.device` to cuda or cpu. Raises ConfigError for cuda if torch finds no CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda: torch finds no CUDA device; allowed: auto, cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def backend(type: str) -> str:
    """The process group's backend. On CUDA, gloo is for CPU tensors: offloaded parameters, agreements."""
    return "cpu:gloo,cuda:nccl" if type == "cuda" else "gloo"


def start(device_name: str, timeout_seconds: int, seed: int) -> torch.device:
    """Joins the process group (NCCL on CUDA, gloo on CPU) and returns this process's device.

    Under torchrun the environment defines rank and world size; without it the world size is 1. A process group that
    is already initialised is kept; it needs a backend for CPU tensors. Every process gets the same seed: processes
    read different data, but draw the same random numbers.
    """
    type = device_type(device_name)
    device = torch.device("cpu")
    if type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # record collectives for the watchdog's report
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
    """Ends the process with `os._exit`, because gloo's threads can abort a normal interpreter exit (pytorch#190489)."""
    logging.shutdown()
    if dist.is_initialized() and code in (0, EXIT_STOPPED):  # after an error, other ranks may not reach this call
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class GarbageCollection:
    """Collects Python's garbage on all ranks after the same steps: every `freq` steps. 0 keeps automatic collection.

    Automatic collection starts when enough objects have been allocated, at a different time on each rank, and a pause
    of one rank makes all others wait in the next collective.
    """

    def __init__(self, freq: int) -> None:
        self.freq, self.frozen = freq, False
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        """Call it after each step."""
        if not self.freq:
            return
        mark_phase("garbage collection", in_step=True)
        if not self.frozen:
            gc.collect()
            gc.freeze()  # later collections skip the objects of the set-up and the first step, which stay alive
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
