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

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import EXIT_CONFIG, ConfigError
from titanlite.runtime.interpreter import leave_out_current_folder, without_package

COMMANDS = (
    "train",
    "config",
    "schedule",
    "plan",
    "explain",
    "prepare",
    "verify",
    "break",
    "learn",
    "generate",
    "chat",
    "convert",
    "checkpoint",
    "evaluate",
    "report",
    "tokenizer",
    "import-config",
    "eject",
)
# pyproject.toml's
DEPENDENCIES = ("torch", "numpy", "tiktoken", "regex", "safetensors", "tqdm", "tomli")
USAGE = """usage: titanlite COMMAND ...

  train [CONFIG] [--section.key=value ...]       train, as ./run_train.sh; --help lists every key
  config [CONFIG] [--section.key=value ...]      check a configuration, print it as TOML
  schedule [CONFIG] [--key=value ...] [--svg F]  draw the learning rate and batch size of each step
  plan [CONFIG] [--gpus N] [--gpu NAME] [...]    what a run needs: memory, time, cost, before it
  explain [CONFIG] [--layout L] [--html FILE]    one step in order: each collective and its cause
  prepare SOURCE... --out FOLDER                 tokenise text, JSONL, Parquet and more
  prepare --inspect FOLDER                       describe and verify tokenised data
  prepare [CONFIG] [--section.key=value ...]     tokenise a configuration's data into the cache
  verify [CONFIG] [--quick] [--processes N]      show that every parallel layout equals one process
  break [NAME ...] [--show] [--list]             plant a fault, predict which figure shows it
  learn [start LESSON | check [FOLDER]]          the course: exercises, graded on this machine
  generate CHECKPOINT [--prompt TEXT]            sample text from a checkpoint of any format
  chat CHECKPOINT [--prompt TEXT]                talk to a model in the terminal
  convert SOURCE TARGET [--to FORMAT]            write a checkpoint in another format and check it
  checkpoint list|verify|show|diff|prune ...     list, check, show and delete checkpoints of a run
  evaluate CHECKPOINT [--tasks A,B] [...]        tasks of lm-eval; --perplexity DATA: loss on a text
  report RUN... [--text] [--live] [--out FILE]   charts and findings of a run, or several compared
  tokenizer train|info|encode|decode ...         train, describe or use a byte-pair encoding
  import-config FILE [--out FILE.toml]           the config of another trainer as one of ours
  eject FOLDER                                   copy train.py and the configs, to change them there

`titanlite COMMAND --help` lists the options."""


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
    """Imports the file of the command and runs it. Raises ConfigError for an unknown name."""
    try:
        if name in ("-h", "--help"):
            print(USAGE)
            return 0
        if name not in COMMANDS:
            hint = suggestion(name, list(COMMANDS))
            raise ConfigError([f"unknown command {name!r}{hint}", *USAGE.splitlines()])
        file = name.replace("-", "_") + "_command"
        module = importlib.import_module(f"titanlite.tools.cli.{file}")
        code: int = module.run(arguments)
        return code
    finally:
        # While `main` can still handle a closed pipe: at its end the interpreter prints a traceback
        sys.stdout.flush()


def _print_errors(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_CONFIG
