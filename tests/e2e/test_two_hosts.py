"""Two nodes that share nothing but the file system: network, host name and name resolution are
those of two hosts.

Each host is a group of Linux namespaces with its own loopback interface. A virtual network card in
each is connected to the other by this test, which delays packets and loses some. Needs root and
/dev/net/tun.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from launches import ROOT, environment, finish, wait_for_step
from messages import assert_mentions
from runs import curve

pytestmark = pytest.mark.slow
NAMESPACES = ["--net", "--mount", "--uts"]
ADDRESSES = {4: ("10.77.0.1", "10.77.0.2"), 6: ("fd77::1", "fd77::2")}
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # of Linux's if_tun.h
WITHOUT = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


class Wire(threading.Thread):
    """Two network cards in this namespace, `wire0` and `wire1`, and what is between them."""

    # Seconds in each direction, and the part of the packets that is lost
    DELAY, LOSS = 0.001, 0.002

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ends, self.lost, self.closed = [], 0, False
        for i in range(2):
            self.ends.append(end := os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(
                end, TUNSETIFF, struct.pack("16sH22x", f"wire{i}".encode(), IFF_TAP | IFF_NO_PI)
            )

    def run(self) -> None:
        chance, under_way = random.Random(0), collections.deque()
        while not self.closed:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for end in select.select(self.ends, [], [], wait)[0]:
                try:
                    frame, lost = os.read(end, 65536), chance.random() < self.LOSS
                except OSError:  # the card is gone, with its host
                    return
                self.lost += lost
                if not lost:
                    under_way.append(
                        (time.monotonic() + self.DELAY, self.ends[1 - self.ends.index(end)], frame)
                    )
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, frame = under_way.popleft()
                with contextlib.suppress(OSError):  # the card is down
                    os.write(end, frame)

    def close(self) -> None:
        self.closed = True
        self.join()
        for end in self.ends:
            os.close(end)


class Host:
    """A host with one network card, `wire0` or `wire1`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keeper = subprocess.Popen(["unshare", *NAMESPACES, "sleep", "600"])
        while Path(f"/proc/{self.keeper.pid}/ns/net").samefile("/proc/self/ns/net"):
            assert self.keeper.poll() is None
            time.sleep(0.01)

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.keeper.pid), *NAMESPACES, *command]

    def run(self, *command: str, check: bool = True) -> None:
        subprocess.run(self.enter(*command), check=check, capture_output=True, text=True)

    def start(self, node: int, arguments: list[str], **variables: str) -> subprocess.Popen:
        given = {
            key: value for key, value in environment(**variables).items() if key not in WITHOUT
        }
        return subprocess.Popen(
            self.enter(str(ROOT / "run_train.sh"), *arguments),
            env=given
            | {"NNODES": "2", "NODE_RANK": str(node), "NGPU": "1", "MASTER_PORT": "29533"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """Those of this host, without the one that keeps it."""
        found, own = [], Path(f"/proc/{self.keeper.pid}/ns/net").stat()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    os.path.samestat((path / "ns/net").stat(), own)
                    and int(path.name) != self.keeper.pid
                ):
                    found.append(int(path.name))
        return found

    def fail(self) -> None:
        """As if it lost its power."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def wire():
    try:
        wire = Wire()
    except OSError as error:
        pytest.skip(f"no virtual network cards here: {error}")
    wire.start()
    yield wire
    wire.close()


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def hosts(request, wire, tmp_path):
    """Two connected hosts, first and second.

    Each resolves the other's name, and its own to 127.0.1.1.
    """
    if missing := [
        tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if not shutil.which(tool)
    ]:
        pytest.skip(f"needs {missing}")
    addresses, made = ADDRESSES[request.param], []
    bits = ["/24"] if request.param == 4 else ["/64", "nodad"]
    try:
        for i, name in enumerate(("first", "second")):
            made.append(host := Host(name))
            subprocess.run(
                ["ip", "link", "set", f"wire{i}", "netns", str(host.keeper.pid)], check=True
            )
            host.run(
                "ip", "address", "add", f"{addresses[i]}{bits[0]}", "dev", f"wire{i}", *bits[1:]
            )
            for card in (f"wire{i}", "lo"):
                host.run("ip", "link", "set", card, "up")
            names = tmp_path / f"hosts-{name}"
            names.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n{addresses[1 - i]} "
                f"{('second', 'first')[i]}\n"
            )
            host.run("mount", "--bind", str(names), "/etc/hosts")
            host.run("hostname", name)
        yield made, addresses
    finally:
        for host in made:
            host.fail()
            host.keeper.kill()
            host.keeper.wait()


def test_a_host_fails_and_the_run_goes_on(hosts, wire, arguments, tmp_path):
    """Training over the wire; one host loses its power; the other ends; both start again and
    finish.
    """
    (first, second), addresses = hosts
    run = [
        *arguments,
        "--training.steps=200",
        "--checkpoint.freq=5",
        "--validation.freq=0",
        "--schedule.warmup_steps=2",
    ]
    run += ["--comm.step_timeout_seconds=10"]
    both = [
        host.start(node, run, MASTER_ADDR=addresses[0]) for node, host in enumerate((first, second))
    ]
    wait_for_step(tmp_path / "debug", 12, both[0])
    second.fail()
    failed = time.monotonic()
    code, output = finish(both[0])
    assert code not in (0, 75), output
    assert time.monotonic() - failed < 30
    finish(both[1])
    short = [*run, "--training.steps=30"]
    both = [
        host.start(node, short, MASTER_ADDR=addresses[0])
        for node, host in enumerate((first, second))
    ]
    (code, output), (other, rest) = (finish(process) for process in both)
    assert (code, other) == (0, 0), output + rest
    assert "resumed from" in output
    assert sorted(curve(tmp_path / "debug"))[-1] == 30
    assert wire.lost, "packets, which TCP has sent again"


def test_the_second_host_finds_the_first_by_name(hosts, arguments, tmp_path):
    """On the first its own name is 127.0.1.1, as on Debian: there the address is needed, and the
    message says so.
    """
    (first, second), addresses = hosts
    process = first.start(0, arguments, MASTER_ADDR="first")
    code, output = finish(process)
    assert code == 2
    assert_mentions(output, "MASTER_ADDR", "127.0.1.1", "IP address")
    one = first.start(0, arguments, MASTER_ADDR=addresses[0])
    two = second.start(1, arguments, MASTER_ADDR="first")
    (code, output), (other, rest) = finish(one), finish(two)
    assert (code, other) == (0, 0), output + rest
