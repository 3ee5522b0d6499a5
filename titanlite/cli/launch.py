"""The launcher: starts the training processes of this node.

What it is: `titanlite train`, which run_train.sh calls. It checks the config and prepares the data before torch is
imported, so that a mistake is reported at once. Then it starts NGPU processes of train.py through torchrun, or a single
one directly, which saves the seconds in which torchrun imports torch.
Why it is not torchrun alone: torchrun turns every exit code of a worker into 1 and a stack trace, restarts workers that
stopped on request, and kills them 30 seconds after a signal. The launcher forwards signals (SIGTERM, Ctrl-C, or a
scheduler's SIGUSR1) to the workers, which save and exit without a time limit, returns their exit code, and restarts a
failed run up to MAX_RESTARTS times from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from titanlite.config.load import load_config, program_folder
from titanlite.config.schema import EXIT_CONFIG, EXIT_HUNG, EXIT_STOPPED, LAUNCHED, ConfigError
from titanlite.data.prepare import find_text, prepare
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.parallel.layout import resolve_degrees
from titanlite.parallel.rules import check_layout

DRIVERS = ("nvidiactl", "dxg", "kfd")  # of NVIDIA, on Linux and in WSL, and of AMD
TRAIN = program_folder() / "train.py"
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def launch(argv: list[str]) -> int:
    """Trains with the config that `argv` describes; returns the workers' exit code. Raises ConfigError."""
    if not TRAIN.exists():
        raise ConfigError(f"{TRAIN}: no such file; titanlite is not completely installed, install it again")
    config = load_config(argv)
    nodes = _number("NNODES", 1)
    node = _number("NODE_RANK", 0, low=0, high=nodes - 1)
    here = _number("NGPU", 0) if os.environ.get("NGPU") else _default_processes(config.run.device)
    port = _number("MASTER_PORT", 29500, high=65535)
    restarts = _number("MAX_RESTARTS", 0, low=0)
    # One thread per core, over all processes; with more, the processes wait for each other.
    threads = _number("OMP_NUM_THREADS", max(1, usable_cores() // here))
    tokenizer: list[Tokenizer] = []
    llama: list[LlamaConfig] = []
    problems: list[str] = []
    for check in (  # independent mistakes are reported together
        lambda: find_text(config.data),
        lambda: tokenizer.append(Tokenizer(config.data.tokenizer)),
        lambda: llama.append(resolve_flavor(config.model, tokenizer[0].size if tokenizer else 1)),
        lambda: (
            check_layout(config, llama[0], nodes * here) if llama else resolve_degrees(config.parallel, nodes * here)
        ),
    ):
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    prepare(config.data, tokenizer[0])

    os.environ["OMP_NUM_THREADS"] = str(threads)
    # For the c10d rendezvous: a restart must not see old keys (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    arguments = ["--nproc-per-node", str(here), "--nnodes", str(nodes), "--node-rank", str(node)]
    _handle_signals()
    for restart in range(restarts + 1):
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # any free port
        if nodes > 1 or "MASTER_PORT" in os.environ:
            # The next port for each restart: a faster node must not join the others' last attempt, which is still
            # ending.
            address = os.environ.get("MASTER_ADDR", "127.0.0.1")
            rendezvous = ["--master-addr", address, "--master-port", str(port + restart)]
        alone = nodes * here == 1 and "MASTER_PORT" not in os.environ
        code = _alone(argv) if alone else _torchrun([*arguments, *rendezvous, str(TRAIN), *argv])
        if code in (0, EXIT_CONFIG, EXIT_STOPPED) or _forwarded or restart == restarts:
            break
        print(f"restarting ({restart + 1} of {restarts})", file=sys.stderr)
    return code


def _alone(argv: list[str]) -> int:
    """train.py as the only process, in a separate session as torchrun's workers: Ctrl-C reaches only the launcher."""
    others = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    )  # which another launcher may have set
    environment = {name: value for name, value in os.environ.items() if name not in others} | {LAUNCHED: "1"}
    code = subprocess.Popen([sys.executable, str(TRAIN), *argv], start_new_session=True, env=environment).wait()
    return _explain({0: code}) if code else 0


def _torchrun(arguments: list[str]) -> int:
    """torchrun in this process, with our handling of signals and exit codes."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_explain` prints what matters
    # torchrun installs its handlers only for the signals named here: for SIGQUIT, which ends it at once.
    try:
        main(["--signals-to-handle", "SIGQUIT", *arguments])
    except ChildFailedError as error:
        return _explain({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (RuntimeError, RendezvousError) as error:  # another node did not join
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"error: the nodes did not find each other: {reason}", file=sys.stderr)
        return 1
    return 0


def _explain(codes: dict[int, int]) -> int:
    """The run's exit code from those of its processes (rank -> code); prints a message if they printed none."""
    if _forwarded and set(codes.values()) <= {-signal.SIGTERM, EXIT_STOPPED}:
        return EXIT_STOPPED  # stopped on request, perhaps before there was anything to save
    if EXIT_HUNG in codes.values():
        return EXIT_HUNG  # the watchdog has named the process, and killed it if need be
    # A killed process is the cause, not the errors of the others; SIGTERM is what torchrun itself sends to them.
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    rank = (killed or [rank for rank, code in codes.items() if code > 0] or list(codes))[0]
    code = codes[rank]
    if code < 0:
        print(f"error: the process of rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    elif code not in (EXIT_CONFIG, EXIT_STOPPED):
        print(
            f"error: the process of rank {rank} failed with exit code {code}; its messages are above", file=sys.stderr
        )
    return code if code > 0 else 128 - code


def _handle_signals() -> None:
    """Forwards signals from a thread: the main thread may wait for other nodes in code that runs no handlers."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)  # the wake-up descriptor gets the number as a byte
    signal.set_wakeup_fd(writing)

    def listen() -> None:
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                _forward(number[0])

    threading.Thread(target=listen, daemon=True).start()


_forwarded: list[float] = []  # the time of each forwarded signal


def _forward(number: int) -> None:
    """Forwards a signal to the training processes, which run in separate sessions; exits if there are none.

    They get SIGTERM, also for Ctrl-C: if they do not handle it yet, it ends them without a stack trace. Signals that
    follow within a second are the same request (see signals.Requests). A later one kills the processes, since a process
    that waits in a collective runs no handler.
    """
    now = time.monotonic()
    if _forwarded and now < _forwarded[0] + 1:
        return
    children = _children()
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, signal.SIGKILL if _forwarded else signal.SIGTERM)
    _forwarded.append(now)
    if not children:
        os._exit(128 + number)


def _children() -> list[int]:
    """The child processes of this one: from /proc on Linux, otherwise from `ps`."""
    own = os.getpid()
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
        pairs = [line.split() for line in ps.communicate()[0].splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == own and int(child) != ps.pid]


def _number(name: str, default: int, low: int = 1, high: int = 1_000_000) -> int:
    """A number from the environment. Raises ConfigError for anything else."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(f"{name} = {text!r} in the environment: expected an integer from {low} to {high}")
    return int(text)


def _default_processes(device: str) -> int:
    """One process per CUDA device, or a single one on the CPU. Without a driver there is no need to import torch."""
    if device == "cpu" or not any(Path("/dev", name).exists() for name in DRIVERS):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def usable_cores() -> int:
    """The number of cores to compute with, at least 1: that many threads, over all processes, are started.

    Cores, not hardware threads: two threads that share a core have one set of arithmetic units, and a matrix product
    gains nothing from the second. And not more than a container may use, which sees all cores of its machine.
    """
    threads = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(thread) for thread in threads}
    return max(1, math.ceil(min(len(cores), _quota())))


def _siblings(thread: int) -> str:
    """The hardware threads that share this one's core, as Linux lists them; elsewhere the thread itself."""
    with contextlib.suppress(OSError):
        return (TOPOLOGY / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
    return str(thread)


def _quota() -> float:
    """How many cores' time may be used: the least that this process's control group, or one above it, is given."""
    own = ["0::/", "0:cpu:/"]
    with contextlib.suppress(OSError):
        own += OWN_GROUPS.read_text().splitlines()
    least = float("inf")
    for line in own:  # version 2: "0::/path"; version 1: "4:cpu,cpuacct:/path"
        _, controllers, path = line.split(":", 2)
        top = CONTROL_GROUPS / ("cpu" if "cpu" in controllers.split(",") else "")
        group = top / path.strip("/")
        while group.is_relative_to(top):  # in a container a path may lead nowhere, and its top is what it is given
            least = min(least, _limit(group))
            group = group.parent
    return least


def _limit(group: Path) -> float:
    """A control group's own quota in cores; infinite without one."""
    with contextlib.suppress(OSError, ValueError):  # version 2: "200000 100000", or "max 100000"
        limit, period = (group / "cpu.max").read_text().split()
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
        limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    return float("inf")
