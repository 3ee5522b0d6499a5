"""A training process: its device and memory, the process group it joins, its garbage collection,
and its end.

What it is: the set-up of a process before the model is built: backend, device and random seed. Rank
0 serves the store on a socket that the launcher has bound and passed to it. If all processes run on
one machine, gloo and NCCL use its loopback interface too, so no port of the run can be reached from
the network.
What it costs: one rendezvous at the start.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import resource
import socket
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titanlite.distributed.watchdog import mark_phase
from titanlite.runtime.errors import EXIT_STOPPED, LAUNCHED, ConfigError

_host: Any = None  # see `host_group`
# Of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def device_type(name: str) -> str:
    """Resolves `run.device` to cuda, mps or cpu.

    Raises ConfigError for a device that torch does not find.
    """
    if (name == "cuda" and not torch.cuda.is_available()) or (
        name == "mps" and not torch.backends.mps.is_available()
    ):
        raise ConfigError(f"run.device = {name}: torch finds no such device; allowed: auto, cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else {"mps": "Apple GPU"}.get(device.type, "CPU")
    )


def host_group() -> Any:
    """The one gloo group of all ranks for CPU tensors; None stands for the default group, which it
    is on the CPU.

    On CUDA the default group has NCCL only. If it had gloo too, every axis of a mesh would get a
    gloo group with a socket for each pair of its ranks, because `split_group` splits all backends
    (torch 2.11 and 2.13).
    """
    return _host


def start(
    device_name: str, timeout_seconds: int, seed: int, deterministic: bool = False
) -> torch.device:
    """Joins the process group (NCCL on CUDA, gloo on CPU) and returns this process's device.

    The launcher or torchrun define rank and world size in the environment; otherwise the world size
    is 1. A process group that is already initialised (see `join`) is kept. Every process gets the
    same seed: processes read different data, but draw the same random numbers. Raises JoinError if
    other nodes are missing.
    """
    if deterministic:
        from titanlite.runtime.deterministic import use_deterministic_operators

        use_deterministic_operators()
    device = open_device(device_name)
    if not dist.is_initialized():
        # Rank 0's store and the gloo group need descriptors for each rank, and the usual soft limit
        # is 1,024. On macOS the hard limit is unlimited, which it refuses as a soft limit; it
        # accepts 10,240.
        soft, cap = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (max(soft, 10_240) if cap == resource.RLIM_INFINITY else cap, cap),
        )
        rank = 0
        world_size = 1
        one_machine = True
        store: dist.Store | None = dist.HashStore()
        if "RANK" in os.environ:
            rank = int(os.environ["RANK"])
            world_size = int(os.environ["WORLD_SIZE"])
            one_machine = world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 0))
            store = None
            if LAUNCHED in os.environ:
                # Not by a process that was started alone
                from titanlite.distributed.rendezvous import meet

                store = meet(rank, world_size)
                store.set_timeout(timedelta(seconds=timeout_seconds))
        if one_machine:
            use_loopback()
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            from titanlite.distributed.network import interface_towards  # only on several nodes

            interface = interface_towards(os.environ["MASTER_ADDR"])
            if interface:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
        join(device, timeout_seconds, rank, world_size, store)
    random.seed(seed)
    torch.manual_seed(seed)
    return device


def open_device(name: str) -> torch.device:
    """The device of this process: the CPU, Apple's GPU, or the CUDA device whose index is its rank
    on the node.
    """
    kind = device_type(name)
    if kind != "cuda":
        keep_freed_memory()
        return torch.device(kind)
    # Segments that can grow waste less memory between tensors of changing sizes. Read when CUDA
    # allocates first.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors, unless a variable MALLOC_* or GLIBC_TUNABLES is
    set.

    By default it returns freed tensors of more than 32 MB to the system, and smaller ones often.
    The system clears each page before it gives it out again, which can take as long as the
    computation (docs/gpu.md). This holds for the main thread, which computes; other threads still
    return what is larger than 64 MB.
    """
    libc = ctypes.CDLL(None)
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ) and hasattr(
        libc, "mallopt"
    ):
        # Large tensors too come from the heap, not from separate mappings
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # the end of the heap is not returned either


def join(
    device: torch.device, timeout_seconds: int, rank: int, world_size: int, store: dist.Store | None
) -> None:
    """Joins the process group through `store`; None: as torchrun's environment says. With
    `device_id` on CUDA, so that NCCL connects at once and splits subgroups; messages between hosts
    get a gloo group.

    Training, `titanlite verify` and the tests join by this function.
    """
    global _host
    # Record collectives for the watchdog's report
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_seconds)}
    if device.type == "cuda":
        options["device_id"] = device
    if store is not None:
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    _host = (
        dist.new_group(backend="gloo", timeout=options["timeout"])
        if device.type == "cuda"
        else None
    )


def use_loopback() -> None:
    """Makes gloo and NCCL listen on the loopback interface only, unless the user has chosen another
    interface.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, loopback)


def finish(code: int) -> NoReturn:
    """Ends the process with `os._exit`, because gloo's threads can abort a normal interpreter exit
    (pytorch#190489).
    """
    logging.shutdown()
    # After an error, other ranks may not reach this call
    if dist.is_initialized() and code in (0, EXIT_STOPPED):
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class GarbageCollection:
    """Collects Python's garbage on all ranks after the same steps: every `freq` steps. 0 keeps
    automatic collection.

    Automatic collection starts when enough objects have been allocated, at a different time on each
    rank, and a pause of one rank makes all others wait in the next collective.
    """

    def __init__(self, freq: int) -> None:
        self.freq = freq
        self.frozen = False
        if freq:
            gc.disable()
            gc.collect()

    def step(self, step: int) -> None:
        """Call it after each step."""
        if not self.freq:
            return
        mark_phase("garbage collection", in_step=True, on_host=True)
        if not self.frozen:
            gc.collect()
            # Later collections skip the objects of the set-up and the first step, which stay alive
            gc.freeze()
            self.frozen = True
        elif step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
