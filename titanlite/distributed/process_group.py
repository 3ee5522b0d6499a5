"""The process group: how a process joins the others, and how it leaves.

What it is: the set-up of a process before the model is built: its device, random seed and backend.
Rank 0 serves the store, the key-value server by which the processes find each other (a TCPStore),
on a socket that the launcher has bound and passed to it. If all processes run on one machine, gloo
and NCCL use its loopback interface too, so no port of the run can be reached from the network.
What it costs: one rendezvous at the start.
"""

from __future__ import annotations

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

from titanlite.config.schema import CommConfig, DebugConfig, RunConfig
from titanlite.distributed.rendezvous import interface_towards, meet
from titanlite.distributed.torch_private import set_group_timeout
from titanlite.runtime.device import choose_attention, open_device, use_deterministic_operators
from titanlite.runtime.errors import EXIT_STOPPED, LAUNCHED

_host_group: dist.ProcessGroup | None = None  # see `host_group`
_checkpoint_group: dist.ProcessGroup | None = None  # see `checkpoint_group`
# The time-out of groups whose ranks arrive at very different times (preparing data, saving,
# loading). Hangs are detected by the watchdog
PATIENCE = timedelta(days=1)


def host_group() -> dist.ProcessGroup | None:
    """Returns the gloo group of all ranks for CPU tensors; None stands for the default group.

    On the CPU it is the default group. On CUDA the default group has NCCL only: if it had gloo too,
    every axis of a mesh would get a gloo group with a socket for each pair of its ranks, because
    `split_group` splits all backends (torch 2.11 and 2.13).
    """
    return _host_group


def checkpoint_group() -> dist.ProcessGroup | None:
    """Returns the gloo group of all ranks for torch.distributed.checkpoint; None: the default one.

    It is a separate group because the saving thread sends messages while training does.
    """
    return _checkpoint_group


def start(run: RunConfig, comm: CommConfig, debug: DebugConfig) -> torch.device:
    """Joins the process group (NCCL on CUDA, gloo on CPU) and returns this process's device.

    The launcher or torchrun defines rank and world size in the environment; without them the world
    size is 1. A process group that is already initialised (see `join`) is kept. Every process gets
    the same seed: processes read different data, but draw the same random numbers. Raises JoinError
    if other nodes are missing.
    """
    if debug.deterministic:
        use_deterministic_operators()
    choose_attention(debug.cudnn_attention)
    device = open_device(run.device)
    if not dist.is_initialized():
        _raise_limit_of_open_files()
        _join_world(device, comm.group_timeout_seconds)
    random.seed(run.seed)
    torch.manual_seed(run.seed)
    return device


def _raise_limit_of_open_files() -> None:
    """Raises the limit of open files: rank 0's store and the gloo groups need descriptors for each
    rank, and the usual soft limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard
    if hard == resource.RLIM_INFINITY:
        # macOS refuses an unlimited soft limit; it accepts 10,240
        limit = max(soft, 10_240)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _join_world(device: torch.device, timeout_seconds: int) -> None:
    """Joins the processes that the environment names; without a launcher, this one is alone."""
    if "RANK" not in os.environ:
        use_loopback()
        join(device, timeout_seconds, 0, 1, dist.HashStore())
        return
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store: dist.Store | None = None
    if LAUNCHED in os.environ:
        store = meet(rank, world_size)
        store.set_timeout(timedelta(seconds=timeout_seconds))
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):  # one machine
        use_loopback()
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    join(device, timeout_seconds, rank, world_size, store)


def join(
    device: torch.device, timeout_seconds: int, rank: int, world_size: int, store: dist.Store | None
) -> None:
    """Joins the process group through `store`; None: as torchrun's environment says.

    Training, `titanlite verify` and the tests join by this function. It also makes gloo groups: on
    CUDA one for CPU tensors, and on every device one for checkpoints. A group has a socket for each
    other rank.
    """
    global _host_group, _checkpoint_group
    # Let torch record collectives, for the watchdog's report
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    timeout = timedelta(seconds=timeout_seconds)
    options: dict[str, Any] = {"timeout": timeout}
    if store is not None:
        options |= {"store": store, "rank": rank, "world_size": world_size}
    if device.type == "cuda":
        # With `device_id` NCCL connects at once, and subgroups are split from the default one
        dist.init_process_group("nccl", device_id=device, **options)
        _host_group = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", **options)
        _host_group = None
    # A short time-out here, so that ranks that cannot connect are noticed
    _checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    set_group_timeout(_checkpoint_group, PATIENCE.total_seconds())


def use_loopback() -> None:
    """Makes gloo and NCCL listen on the loopback interface only, unless the user has chosen an
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
