"""How processes meet: the TCPStore by which they join the process group, and the interface to it.

What it is: rank 0 serves the store on a socket that the launcher has bound and passed on, so that
it listens on that address only. The network interface that leads to the other nodes is the one
whose address is the source address for packets to `MASTER_ADDR`.
Why it is here: unless an interface is set, gloo resolves this machine's host name. On Debian and
others that gives 127.0.1.1, to which no other node can connect. NCCL chooses an interface itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from titanlite.runtime.errors import LISTENER, JoinError

JOIN = timedelta(minutes=15)  # how long the nodes wait for each other
SIOCGIFADDR = 0x8915  # from Linux's sockios.h: gets the address of an interface


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


def interface_towards(address: str) -> str:
    """Finds the network interface whose address this machine uses to reach another; "" if there is
    none.
    """
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # only selects a route; sends nothing
            local_address = probe.getsockname()[0].partition("%")[0]  # without a zone
    except OSError:
        return ""
    address_here = ipaddress.ip_address(local_address)
    for _, name in socket.if_nameindex():
        if address_here in _addresses(name):
            return name
    return ""


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Lists the IPv4 address of an interface and its IPv6 addresses (Linux); empty elsewhere."""
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker, SIOCGIFADDR, interface.encode().ljust(40, b"\0"))
        addresses.append(ipaddress.ip_address(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()  # address, ..., name of the interface
            if words[-1] == interface:
                addresses.append(ipaddress.ip_address(bytes.fromhex(words[0])))
    return addresses
