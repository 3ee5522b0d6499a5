"""The command `titanlite`.

What it is: a subcommand is a file in this folder, which is imported when the command is called.
Why it is here: commands that do not compute do not import torch, so they start in a fraction of a
second.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable

from titanlite.runtime.errors import EXIT_CONFIG, ConfigError
from titanlite.runtime.interpreter import leave_out_current_folder, without_package

COMMANDS = (
    "train",
    "config",
    "schedule",
    "prepare",
    "verify",
    "generate",
    "convert",
    "checkpoint",
    "evaluate",
    "report",
    "tokenizer",
    "eject",
)
# pyproject.toml's
DEPENDENCIES = ("torch", "numpy", "tiktoken", "regex", "safetensors", "tqdm", "tomli")
USAGE = """usage: titanlite COMMAND ...

  train [CONFIG] [--section.key=value ...]       train (what ./run_train.sh calls); --help lists every key
  config [CONFIG] [--section.key=value ...]      check a configuration and print all its keys as TOML
  schedule [CONFIG] [--key=value ...] [--svg F]  draw the learning rate and the batch size of every step of a run
  prepare SOURCE... --out FOLDER                 tokenise text, JSONL, Parquet and more; --inspect FOLDER verifies it
  prepare [CONFIG] [--section.key=value ...]     tokenise the data of a configuration into the cache
  verify [CONFIG] [--quick] [--processes N]      show that every parallel layout computes what one process computes
  generate CHECKPOINT [--prompt TEXT]            sample text from a checkpoint of any format
  convert SOURCE TARGET [--to FORMAT]            write a checkpoint in another format and check the result
  checkpoint list|verify|show|diff|prune ...     list, check, show and delete checkpoints of a run
  evaluate CHECKPOINT [--tasks A,B] [--perplexity DATA]  tasks of lm-eval, and loss and perplexity on a text
  report RUN... [--text] [--live] [--out FILE]   charts and findings of a run, or of several compared
  tokenizer train|info|encode|decode ...         train a byte-pair encoding, describe one, use one
  eject FOLDER                                   copy train.py and the configs into a folder, to change them there

`titanlite COMMAND --help` lists the options."""


def limit_spinning() -> None:
    """Makes OpenMP threads wait less actively for each other, unless the environment says how they
    wait.

    By default, GNU OpenMP repeats a test 300,000 times before a thread sleeps. If another process
    needs one of the cores, threads spin while the one that they wait for does not run. The number
    is a compromise: see docs/gpu.md.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1500"


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, or 2 for wrong input.

    Without `argv` it is this process's command.
    """
    if argv is None:
        leave_out_current_folder()
    limit_spinning()  # before torch is imported, here or in a process that is started
    arguments = sys.argv[1:] if argv is None else argv
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        if name not in COMMANDS:
            from titanlite.config.mistakes import suggestion

            raise ConfigError(
                [f"unknown command {name!r}{suggestion(name, list(COMMANDS))}", *USAGE.splitlines()]
            )
        command: Callable[[list[str]], int] = importlib.import_module(
            f"titanlite.tools.cli.{name}_command"
        ).run
        return command(rest)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_CONFIG
    except ModuleNotFoundError as error:
        if error.name not in DEPENDENCIES:
            raise
        print(f"error: {without_package(str(error.name))}", file=sys.stderr)
        return EXIT_CONFIG
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(
            f"error: {ConfigError(f'{error.filename or name}: {error.strerror or error}')}",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
