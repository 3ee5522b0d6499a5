"""What other machines can reach of a run: nothing, as long as it runs on a single one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import ROOT, environment, finish, start, workers
from runs import rows

OPEN = ("0A", "07")  # states in /proc/net: TCP that listens, UDP that is not connected
# 127.x.x.x, ::1, and in IPv6
LOOPBACK = re.compile(r"[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="lists sockets as Linux does"
)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, own in pairs if own == parent]
    return found


def listening(pid: int) -> set[str]:
    """The addresses, as in /proc/net, at which a process and its descendants can be reached."""
    sockets = set()
    for process in family(pid):
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)
            except OSError:  # closed meanwhile
                continue
            sockets |= set(re.findall(r"^socket:\[(\d+)\]$", target))
    addresses = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in sockets and state in OPEN:
                addresses.add(local.partition(":")[0])
    return addresses


def test_a_socket_of_a_network_would_be_found():
    code = (
        "import socket, time; s = socket.create_server(('', 0)); print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.read(1)
        assert [
            address for address in listening(process.pid) if not LOOPBACK.fullmatch(address)
        ] == ["00000000"]
    finally:
        process.kill()
        process.wait()


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)] if (folder / "metrics.jsonl").exists() else []


def watch(process: subprocess.Popen, until: Callable[[], bool]) -> set[str]:
    """All addresses at which the process can be reached until the condition holds or it ends."""
    seen: set[str] = set()
    deadline = time.monotonic() + 120
    while not until() and process.poll() is None and time.monotonic() < deadline:
        seen |= listening(process.pid)
        time.sleep(0.05)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes",
    [pytest.param("1", marks=pytest.mark.slow), "2", pytest.param("4", marks=pytest.mark.slow)],
)
def test_a_run_on_one_machine_listens_on_its_loopback_interface_only(
    arguments, tmp_path, processes
):
    folder = tmp_path / "debug"
    run = [*arguments, "--training.steps=100000", "--validation.freq=0", "--checkpoint.freq=5"]
    # The variables of a run on several nodes are set too, and the run is started again once.
    process = start(
        run, NGPU=processes, MASTER_ADDR="0.0.0.0", MASTER_PORT="29500", MAX_RESTARTS="1"
    )
    seen = watch(process, lambda: len(steps(folder)) > 6)
    os.kill(workers(process)[-1], signal.SIGKILL)
    first = len(steps(folder))
    again = watch(process, lambda: len(steps(folder)) > first + 2)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert output.count("restarting") == 1
    assert seen
    assert again
    assert all(LOOPBACK.fullmatch(address) for address in seen | again), seen | again


@pytest.mark.slow
def test_verify_listens_on_the_loopback_interface_only(options):
    command = [
        sys.executable,
        "-m",
        "titanlite",
        "verify",
        "debug",
        "--layout=tp=2",
        "--layout=dp_shard=2,pp=2",
    ]
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    seen = watch(process, lambda: False)
    assert finish(process)[0] == 0
    assert seen
    assert all(LOOPBACK.fullmatch(address) for address in seen), seen
