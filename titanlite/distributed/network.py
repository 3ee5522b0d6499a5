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

SIOCGIFADDR = 0x8915  # of Linux's sockios.h: the address of an interface


def interface_towards(address: str) -> str:
    """The network interface that has the address from which this machine reaches another; "" if it
    is not found.
    """
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            local_address = probe.getsockname()[0].partition("%")[0]  # without a zone
    except OSError:
        return ""
    address_here = ipaddress.ip_address(local_address)
    for _, name in socket.if_nameindex():
        if address_here in _addresses(name):
            return name
    return ""


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IPv4 address of an interface and its IPv6 addresses (Linux); none elsewhere."""
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
