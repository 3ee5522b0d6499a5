"""Which network interface leads to the other nodes.

What it is: the interface that has the address from which this machine would send to `MASTER_ADDR`.
Why it is here: gloo takes the address of this machine's own name, unless an interface is set. On
Debian and others that is 127.0.1.1, and no other node can connect. NCCL chooses among all
interfaces by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915  # of Linux's sockios.h: the address of an interface


def interface_towards(address: str) -> str:
    """The network interface that has the address from which this machine reaches another; "" if it
    is not found.
    """
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return ""
    for _, name in socket.if_nameindex():
        if own in _addresses(name):
            return name
    return ""


def _addresses(interface: str) -> list[Any]:
    """The IPv4 address of an interface and its IPv6 addresses (Linux); none elsewhere."""
    found: list[Any] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker, SIOCGIFADDR, interface.encode().ljust(40, b"\0"))
        found.append(ipaddress.ip_address(answer[20:24]))
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        found += [
            ipaddress.ip_address(bytes.fromhex(words[0]))
            for words in lines
            if words[-1] == interface
        ]
    return found
