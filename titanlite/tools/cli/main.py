"""Runs the subcommands of `titanlite`.

What it is: a subcommand is a file in this folder, which is imported when the command is called.
Why it is here: commands that do not compute do not import torch, so they start in a fraction of a
second.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import EXIT_CONFIG, ConfigError
from titanlite.runtime.interpreter import (
    leave_out_current_folder,
    open_closed_streams,
    without_package,
)
from titanlite.runtime.version import __version__

HELP = ("-h", "--help")
VERSION = "--version"


class Command(NamedTuple):
    """The line of a command in `titanlite --help`, and the examples at the end of its own help."""

    usage: str  # its arguments
    summary: str
    examples: tuple[str, ...]


COMMANDS = {
    "train": Command(
        "[CONFIG] [--section.key=value ...]",
        "train, as ./run_train.sh; --help lists every key",
        ("train debug --training.steps=100", "train llama3_8b --parallel.tp=2 --print-config"),
    ),
    "plan": Command(
        "[CONFIG] [--gpus N] [--gpu NAME] [...]",
        "what a run needs, before it: memory, time, cost",
        ("plan llama3_8b --gpus 64 --estimate", "plan llama3_70b --gpus 256 --search"),
    ),
    "explain": Command(
        "[CONFIG] [--layout L] [--html FILE]",
        "one step in order: each collective and its cause",
        ("explain debug --layout dp_shard=2,tp=2",),
    ),
    "prepare": Command(
        "SOURCE... --out FOLDER | [CONFIG]",
        "tokenise text, or the data of a config; --inspect",
        ("prepare my_texts --out my_data", "prepare --inspect my_data"),
    ),
    "verify": Command(
        "[CONFIG] [--quick] [--processes N]",
        "show that every parallel layout equals one process",
        ("verify --quick", "verify debug --layout dp_shard=2,tp=2"),
    ),
    "break": Command(
        "[NAME ...] [--show] [--list]",
        "plant a fault, predict which figure shows it",
        ("break rank-means", "break --list"),
    ),
    "learn": Command(
        "[start LESSON | check [FOLDER]]",
        "the course: exercises, graded on this machine",
        ("learn start ddp", "learn check learn-ddp"),
    ),
    "generate": Command(
        "CHECKPOINT [--prompt|--chat TEXT]",
        "sample text from a checkpoint of any format",
        (
            "generate outputs/debug --prompt 'class Test'",
            "generate outputs/lora --chat 'Who?'",
        ),
    ),
    "convert": Command(
        "SOURCE TARGET [--to FORMAT]",
        "write a checkpoint in another format and check it",
        ("convert outputs/debug debug_hf --to hf",),
    ),
    "checkpoint": Command(
        "list|verify|show|diff|prune ...",
        "list, check, show and delete checkpoints of a run",
        ("checkpoint list outputs/debug", "checkpoint prune outputs/debug --keep 3 --dry-run"),
    ),
    "evaluate": Command(
        "CHECKPOINT --perplexity DATA",
        "loss, perplexity and bits per byte of a text",
        ("evaluate outputs/debug --perplexity my_texts",),
    ),
    "report": Command(
        "RUN... [--text] [--out FILE]",
        "charts and findings of a run, or several compared",
        ("report outputs/debug --text", "report outputs/first outputs/second"),
    ),
    "tokenizer": Command(
        "train|info|encode|decode ...",
        "train, describe or use a byte-pair encoding",
        ("tokenizer train my.model --data-path my_texts", "tokenizer encode my.model 'def f(x):'"),
    ),
    "eject": Command(
        "FOLDER",
        "copy train.py and the configs, to change them there",
        ("eject my_project",),
    ),
}
# The dependencies in pyproject.toml
DEPENDENCIES = ("torch", "numpy", "tiktoken", "regex", "safetensors", "tqdm", "tomli")


def usage() -> str:
    """The text of `titanlite --help`: a line for each command."""
    lines = [
        f"  {f'{name} {command.usage}':<46} {command.summary}" for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: titanlite COMMAND ...",
            "",
            *lines,
            "",
            "`titanlite COMMAND --help` lists the options and shows examples.",
            "`titanlite --version` prints the version, and those of torch and Python.",
        ]
    )


def version() -> str:
    """The line of `titanlite --version`."""
    torch = "no torch"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = f"torch {importlib.metadata.version('torch')}"  # without importing it
    return f"titanlite {__version__} ({torch}, Python {platform.python_version()})"


def limit_spinning() -> None:
    """Shortens the time that OpenMP threads wait actively, unless the environment sets it.

    By default, GNU OpenMP repeats a test 300,000 times before a thread sleeps. If another process
    needs one of the cores, threads spin while the one that they wait for does not run. The number
    is a compromise: see docs/cpu.md.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1500"


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code, which is 2 for wrong input.

    Without `argv` it is this process's command.
    """
    if argv is None:
        leave_out_current_folder()
        argv = sys.argv[1:]
    open_closed_streams()
    limit_spinning()  # before torch is imported, here or in a process that is started
    name = argv[0] if argv else "--help"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        return run_command(name, argv[1:])
    except ConfigError as error:
        return _print_errors(error.problems)
    except ModuleNotFoundError as error:
        if error.name not in DEPENDENCIES:
            raise
        return _print_errors([without_package(str(error.name))])
    except BrokenPipeError:  # the reader of the output has closed the pipe
        # What is still buffered goes nowhere when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        problem = ConfigError(f"{error.filename or name}: {error.strerror or error}")
        return _print_errors(problem.problems)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_command(name: str, arguments: list[str]) -> int:
    """Imports the file of the command and runs it; an unknown name is an error with the usage."""
    try:
        if name in HELP:
            print(usage())
            return 0
        if VERSION in (name, *arguments[:1]):  # ./run_train.sh --version
            print(version())
            return 0
        if name not in COMMANDS:
            hint = suggestion(name, list(COMMANDS))
            raise ConfigError(f"unknown command {name!r}{hint}; titanlite --help lists all")
        file = name.replace("-", "_") + "_command"
        module = importlib.import_module(f"titanlite.tools.cli.{file}")
        if set(HELP) & set(arguments):
            return _print_help(name, module.run, arguments)
        finished: int = module.run(arguments)
        return finished
    finally:
        # While `main` can still handle a closed pipe: at its end the interpreter prints a traceback
        sys.stdout.flush()


def _print_help(name: str, run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Lets the command print its help, and adds its examples."""
    try:
        run(arguments)
    except SystemExit as end:  # argparse ends the process after --help, and after wrong arguments
        if end.code:
            raise
    print("\nexamples:")
    for example in COMMANDS[name].examples:
        print(f"  titanlite {example}")
    return 0


def _print_errors(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_CONFIG
