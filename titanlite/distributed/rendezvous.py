"""The TCPStore through which the launcher's processes join the process group.

What it is: rank 0 serves the store on a socket that the launcher has bound and passed on, so that
it listens on that address only.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from titanlite.runtime.errors import LISTENER, JoinError

JOIN = timedelta(minutes=15)  # how long the nodes wait for each other


def meet(rank: int, world_size: int) -> dist.Store:
    """The store that rank 0 serves, once all ranks have joined it. Raises JoinError after `JOIN`.

    By default a TCPStore listens on all interfaces; rank 0 passes it the socket that the launcher
    has bound.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    listener = None
    if LISTENER in os.environ:
        listener = int(os.environ[LISTENER])
    try:
        store = dist.TCPStore(
            address, port, world_size, rank == 0, JOIN, True, master_listen_fd=listener
        )
        if rank == 0:  # all have joined: the constructor has waited for them
            store.set("titanlite/joined", "")
        store.wait(["titanlite/joined"], JOIN)
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JoinError(
            f"the processes did not find each other at {address}:{port}: {lines[0]}"
        ) from None
    return store
