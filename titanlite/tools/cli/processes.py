"""Starts the training processes of a node, forwards signals, and turns their exit codes into one.

What it is: the part of the launcher that runs while training runs. Each process is train.py with
its rank in the environment, under the names that torchrun uses. Signals (SIGTERM, Ctrl-C, or a
scheduler's SIGUSR1) are forwarded to the processes, which save and exit without a time limit.
Why it is not torchrun: torchrun turns every exit code into 1 and a stack trace, restarts processes
that stopped on request, kills them 30 seconds after a signal, and takes two seconds to start. Its
c10d rendezvous listens on all network interfaces and unpickles what it receives, so whoever can
reach the port can run code. Here rank 0 serves the store on a socket that the launcher has bound to
one address, and the rendezvous unpickles nothing.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from titanlite.runtime import interpreter
from titanlite.runtime.errors import (
    EXIT_CONFIG,
    EXIT_HUNG,
    EXIT_LOST,
    EXIT_STOPPED,
    LAUNCHER,
    LISTENER,
    ConfigError,
)

# Seconds until processes that still run are killed, after one has failed and after the watchdog has
# ended one; after a hang only a frozen process still runs then
GRACE = 30.0
HUNG_GRACE = 2.0
PERIOD = 0.05  # seconds between checks of the processes and the signals
# Descriptors that a process needs: gloo connects all ranks twice, for training and for checkpoints,
# and rank 0 serves the store, with two connections per rank. Counted: 43 + 2 per rank, and in rank
# 0 53 + 4 per rank. The others are for the files that a run opens.
OPEN_FILES = 64
OPEN_FILES_PER_RANK = 2
OPEN_FILES_OF_THE_STORE = 2  # per rank
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Signals:
    """Counts requests to stop.

    Signals within a second of the first are the same request (see signals.Requests).
    """

    def __init__(self) -> None:
        self.requests = 0
        self.number = 0  # of the first signal
        self.first = 0.0  # when it came, by the monotonic clock
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.receive(number))

    def receive(self, number: int) -> None:
        now = time.monotonic()
        if not self.requests:
            self.number = number
            self.first = now
        if not self.requests or now > self.first + 1:
            self.requests += 1


def listen(address: str, port: int) -> socket.socket:
    """The socket on which rank 0 serves the store, bound to this address only.

    Raises ConfigError.
    """
    expected = "expected an address of node 0 and a free port"
    where = f"MASTER_ADDR = {address!r}, MASTER_PORT = {port} in the environment"
    try:
        family, *_, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        ip = str(endpoint[0])
        is_name = not _is_ip_address(address) and address != "localhost"
        if is_name and ipaddress.ip_address(ip).is_loopback:
            raise ConfigError(  # on Debian, a machine's own name does
                f"{where}: on node 0 this name is the loopback address {ip}, "
                "which no other node can reach; expected an IP address of node 0"
            )
        return socket.create_server((ip, port), family=family, backlog=4096)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; {expected}") from None
    except UnicodeError:  # from the encoding of a host's name
        raise ConfigError(f"{where}: not the name of a host; {expected}") from None


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Group(NamedTuple):
    """The processes of a run, and the address where they meet."""

    num_nodes: int
    node: int  # this one
    per_node: int  # processes
    address: str  # where node 0 listens
    port: int  # 0: any free one, if there is one node

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.per_node


def run(command: list[str], variables: dict[str, str], group: Group, signals: Signals) -> int:
    """Runs this node's processes to their end, and returns the run's exit code on this node.

    `variables` are added to the environment. Raises ConfigError if the processes cannot be started.
    """
    inherited = dict(os.environ)
    for name in (*RANK_VARIABLES, LISTENER):  # which another launcher may have set
        inherited.pop(name, None)
    inherited |= variables | interpreter.environment() | {LAUNCHER: str(os.getpid())}
    if group.world_size == 1:
        return wait({0: start(command, inherited)}, signals)
    require_open_files(group)
    port = group.port
    listener: socket.socket | None = None
    if group.node == 0:
        listener = listen(group.address, port)
        port = listener.getsockname()[1]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for local_rank in range(group.per_node):
            rank = group.node * group.per_node + local_rank
            environment = inherited | {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(group.world_size),
                "LOCAL_WORLD_SIZE": str(group.per_node),
                "MASTER_ADDR": group.address,
                "MASTER_PORT": str(port),
            }
            if listener is not None and rank == 0:
                environment[LISTENER] = str(listener.fileno())
                processes[rank] = start(command, environment, listener.fileno())
                listener.close()  # rank 0 has a copy
            else:
                processes[rank] = start(command, environment)
        return wait(processes, signals)
    finally:  # they still run only if starting one of them failed
        for process in processes.values():
            process.kill()


def require_open_files(group: Group) -> None:
    """Raises ConfigError if a process may not open enough files: gloo would abort.

    A process raises its soft limit.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    per_rank = OPEN_FILES_PER_RANK
    if group.node == 0:
        per_rank += OPEN_FILES_OF_THE_STORE
    needed = OPEN_FILES + per_rank * group.world_size
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"ulimit -Hn = {limit}: in a run of {group.world_size} processes, each on node "
            f"{group.node} needs {needed} open files; expected a hard limit of at least {needed}"
        )


def start(
    command: list[str], environment: dict[str, str], *descriptors: int
) -> subprocess.Popen[bytes]:
    """Starts a process in a separate session, so that Ctrl-C reaches only the launcher."""
    return subprocess.Popen(
        [sys.executable, *command], env=environment, pass_fds=descriptors, start_new_session=True
    )


def wait(processes: dict[int, subprocess.Popen[bytes]], signals: Signals) -> int:
    """Waits until all processes (rank -> process) have ended; returns the run's exit code.

    The first request to stop is forwarded as SIGTERM, also for Ctrl-C, since SIGTERM ends a process
    that does not handle it yet without a stack trace. The next request kills, since a process that
    waits in a collective runs no handler. When a process fails, the others get SIGTERM too, and are
    killed if they still run after `GRACE` seconds.
    """
    codes: dict[int, int] = {}  # in the order in which the processes ended
    forwarded = 0  # requests
    failed = 0.0  # when the first process did
    overdue = False  # processes that still run after GRACE have been killed
    while len(codes) < len(processes):
        for rank, process in processes.items():
            code = process.poll()
            if code is None or rank in codes:
                continue
            codes[rank] = code
            if overdue:  # killed because another one had failed: not the cause
                codes[rank] = -signal.SIGTERM
        any_failed = not set(codes.values()) <= {0, EXIT_STOPPED}
        grace = HUNG_GRACE if EXIT_HUNG in codes.values() else GRACE
        to_send: signal.Signals | None = None
        if signals.requests > forwarded:
            to_send = signal.SIGKILL if forwarded else signal.SIGTERM
            forwarded = signals.requests
        elif any_failed and not failed:
            failed = time.monotonic()
            to_send = signal.SIGTERM
        elif failed and time.monotonic() > failed + grace:
            overdue = True
            to_send = signal.SIGKILL
        if to_send is not None:
            for rank, process in processes.items():
                if rank not in codes:
                    process.send_signal(to_send)
        time.sleep(PERIOD)
    return explain(codes, forwarded > 0)


def explain(codes: dict[int, int], stopped: bool) -> int:
    """Makes the run's exit code of those of its processes (rank -> code).

    Prints a message if the processes printed none.

    `stopped`: a request to stop was forwarded to them.
    """
    if not any(codes.values()):
        return 0
    if stopped and set(codes.values()) <= {0, -signal.SIGTERM, EXIT_STOPPED}:
        return EXIT_STOPPED  # stopped on request, perhaps before there was anything to save
    if EXIT_HUNG in codes.values():
        return EXIT_HUNG  # the watchdog has named the process
    # A killed process is the cause, not the errors of the others; SIGTERM is what the launcher
    # sends to them.
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    failed = [rank for rank, code in codes.items() if code > 0 and code != EXIT_STOPPED]
    # The others lost their connection to it
    causes = [rank for rank in failed if codes[rank] != EXIT_LOST]
    not_zero = [rank for rank, code in codes.items() if code]
    rank = (killed or causes or failed or not_zero)[0]
    code = codes[rank]
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: the process of rank {rank} was killed by {name}", file=sys.stderr)
        if code == -signal.SIGKILL:
            print(
                "error: Linux kills a process that needs more memory than there is; titanlite "
                "plan CONFIG says how much a run needs",
                file=sys.stderr,
            )
    elif code not in (EXIT_CONFIG, EXIT_STOPPED):
        print(
            f"error: the process of rank {rank} failed with exit code {code}; "
            "its messages are above",
            file=sys.stderr,
        )
    return code if code > 0 else 128 - code
