"""The process group: how a process joins it, on which device, and how it ends.

What it is: what a training process needs from its surroundings before any model exists.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titanlite.config.schema import EXIT_STOPPED, ConfigError


def device_type(name: str) -> str:
    """What `run.device` means here: cuda or cpu. Raises ConfigError for cuda where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda: torch finds no CUDA device; allowed: auto, cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


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
