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
    """Returns the store of rank 0 once all ranks have joined it. Raises JoinError after `JOIN`.

    Rank 0 passes the socket that the launcher has bound, because a TCPStore would otherwise listen
    on all interfaces.
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
        if rank == 0:  # the constructor has waited for all ranks
            store.set("titanlite/joined", "")
        store.wait(["titanlite/joined"], JOIN)
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JoinError(
            f"the processes did not find each other at {address}:{port}: {lines[0]}"
        ) from None
    return store
