"""`--processes N`: runs a command on several processes when one cannot hold the model.

What it is: the command checks its options and starts itself N times, with the launcher's
`processes.run`: `worker` is what such a process runs. The processes join a process group, and each
holds 1/N of the weights (`formats/shared_model.py`). Rank 0 writes the results.
How it ends: all processes find the same mistakes in the input, and rank 0 prints them. A process
that fails otherwise prints its error, and the launcher ends the others, which print nothing.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from titanlite.runtime import interpreter
from titanlite.runtime.errors import EXIT_CONFIG, EXIT_LOST, LAUNCHED, ConfigError, JoinError
from titanlite.runtime.limits import usable_cores
from titanlite.tools.cli import processes
from titanlite.tools.cli.launch import LOOPBACK, environment_number
from titanlite.tools.cli.options import at_least, device_of

if TYPE_CHECKING:
    import torch  # slow to import: not for the options alone

# Returns freed weights to the system at once. By default glibc keeps much of them, and a process on
# the CPU would need more memory than one with the whole model.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
# Seconds that a process waits for the others: rank 0 may wait until its text is read
PATIENCE = 604_800


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=at_least(int, 1, 1024),
        default=1,
        metavar="N",
        help="share the weights among N processes of this machine, on CUDA one per GPU; default: 1",
    )


def is_to_start(options: argparse.Namespace) -> bool:
    """Whether this process has to start the others and takes no part itself."""
    return options.processes > 1 and LAUNCHED not in os.environ


def start(command: str, argv: list[str], count: int) -> int:
    """Runs a command on `count` processes; returns its exit code. Raises ConfigError."""
    threads = environment_number("OMP_NUM_THREADS", max(1, usable_cores() // count))
    variables = {LAUNCHED: "[]", "OMP_NUM_THREADS": str(threads)}
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        variables |= RETURN_FREED_MEMORY
    # Without the interpreter, which `processes` adds
    program = interpreter.call(worker, command, *argv)[1:]
    signals = processes.Signals()
    code = processes.run(program, variables, processes.Group(1, 0, count, LOOPBACK, 0), signals)
    if code and signals.requests:
        return 128 + signals.number
    return code


def join(options: argparse.Namespace) -> torch.device:
    """Joins the other processes, if there are any, and returns this one's device.

    Raises ConfigError.
    """
    if options.processes == 1:
        return device_of(options)
    import torch

    from titanlite.config.schema import CommConfig, DebugConfig, RunConfig
    from titanlite.distributed import process_group
    from titanlite.runtime.device import device_type

    if device_type(options.device) == "cuda" and torch.cuda.device_count() < options.processes:
        raise ConfigError(
            f"--processes {options.processes}: torch finds {torch.cuda.device_count()} CUDA "
            "devices; expected at most one process for each, or --device cpu"
        )
    comm = CommConfig(timeout_seconds=PATIENCE)
    return process_group.start(RunConfig(device=options.device), comm, DebugConfig())


def worker(command: str, *argv: str) -> NoReturn:
    """Runs the command in one of the processes, and ends the process with its exit code."""
    from titanlite.distributed import process_group
    from titanlite.runtime.failure import lost_connection, report_failure

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        module = importlib.import_module(f"titanlite.tools.cli.{command}_command")
        code: int = module.run(list(argv))
    except (ConfigError, JoinError) as error:  # on all of them
        code = EXIT_CONFIG
        if os.environ["RANK"] == "0":
            print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except Exception as error:
        code = EXIT_LOST
        if not lost_connection(
            error, __file__
        ):  # else the process that ended has printed its error
            code = report_failure(error, __file__)
    process_group.finish(code)
