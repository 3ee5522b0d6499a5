"""Checks a run and starts the training processes of this node.

What it is: `titanlite train`, which run_train.sh calls. It checks the config and prepares the data
without importing torch (except to find CUDA devices, if there is a driver or run.device is cuda),
so that a mistake is reported at once. Then it starts NGPU processes of train.py (`processes.run`)
and returns their exit code. A failed run is started again up to MAX_RESTARTS times, from its newest
checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.load import load_config, program_folder
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import resolve_degrees
from titanlite.rules.paths import require_initial_load
from titanlite.runtime.errors import EXIT_CONFIG, EXIT_STOPPED, LAUNCHED, ConfigError
from titanlite.runtime.interpreter import without_package
from titanlite.runtime.limits import usable_cores
from titanlite.sinks.installed import require_installed
from titanlite.tokenizer.tokenizer import Tokenizer, named_tokenizer
from titanlite.tools.cli import processes
from titanlite.tools.cli.stops import stoppable
from titanlite.tools.prepare.cache import find_text, prepare
from titanlite.tools.prepare.sources import Found

DRIVERS = ("nvidiactl", "dxg", "kfd")  # NVIDIA on Linux, NVIDIA in WSL, AMD
LOOPBACK = "127.0.0.1"
TRAIN = program_folder() / "train.py"


def launch(argv: list[str]) -> int:
    """Trains with the config that `argv` describes; returns the workers' exit code.

    Raises ConfigError.
    """
    if not TRAIN.exists():
        raise ConfigError(
            f"{TRAIN}: no such file; titanlite is not completely installed, install it again"
        )
    # The training processes import it, and this one does not
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(without_package("torch"))
    config = load_config(argv)
    if config.model.flavor == FROM_CHECKPOINT:
        from titanlite.tools.formats.adopt import adopt_checkpoint  # which needs torch

        config = adopt_checkpoint(config)
    num_nodes = environment_number("NNODES", 1)
    node = environment_number("NODE_RANK", 0, low=0, high=num_nodes - 1)
    if os.environ.get("NGPU"):
        per_node = environment_number("NGPU", 1)
    else:
        per_node = _default_processes(config.run.device)
    restarts = environment_number("MAX_RESTARTS", 0, low=0, high=1000)
    port = environment_number("MASTER_PORT", 29500, high=65535 - restarts)
    # One thread per core, over all processes; with more, the processes wait for each other.
    threads = environment_number("OMP_NUM_THREADS", max(1, usable_cores() // per_node))
    if num_nodes > 1 and not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"MASTER_ADDR is not set in the environment, and NNODES = {num_nodes}: "
            "expected node 0's address"
        )
    folders = prepare_data(config, num_nodes * per_node)
    variables = {
        LAUNCHED: json.dumps([str(folder) for folder in folders]),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [str(TRAIN), *argv]
    signals = processes.Signals()
    for restart in range(restarts + 1):
        # Processes of one machine meet on its loopback interface, where no other machine can
        # connect, on any free port
        address = LOOPBACK
        meeting_port = 0
        if num_nodes > 1:
            address = os.environ["MASTER_ADDR"]
            # The next port for each restart: a faster node must not join the others' last attempt,
            # which is still ending.
            meeting_port = port + restart
        group = processes.Group(num_nodes, node, per_node, address, meeting_port)
        code = processes.run(command, variables, group, signals)
        if code in (0, EXIT_CONFIG, EXIT_STOPPED) or signals.requests or restart == restarts:
            break
        print(f"restarting ({restart + 1} of {restarts})", file=sys.stderr)
    return code


def prepare_data(config: Config, world_size: int) -> list[Path]:
    """Checks all that can be checked before training, then prepares the data: the folder of each
    source.

    Raises ConfigError with all problems.
    """
    problems: list[str] = []  # independent mistakes are reported together
    texts: list[Found] = []  # of each source
    tokenizer: Tokenizer | None = None
    llama: LlamaConfig | None = None
    for part in config.data.parts():
        with collected(problems):
            texts.append(find_text(part))
    with collected(problems):
        require_installed(config.metrics.sinks)
    if config.run.device == "cuda":
        from titanlite.runtime.device import device_type  # which needs torch

        with collected(problems):
            device_type("cuda")
    with collected(problems):
        require_initial_load(config)
    with collected(problems):
        tokenizer = named_tokenizer(config.data.tokenizer)
    with collected(problems):
        llama = resolve_flavor(config.model, tokenizer.size if tokenizer else 1)
    with collected(problems):
        if llama is None:  # without it, no more than the degrees can be checked
            resolve_degrees(config.parallel, world_size)
        else:
            check_layout(config, llama, world_size)
    if problems or tokenizer is None:
        raise ConfigError(problems)
    with stoppable(
        "stopped while the data was prepared; the same command goes on with what is missing"
    ):
        return [
            prepare(part, tokenizer, found=text)
            for part, text in zip(config.data.parts(), texts, strict=True)
        ]


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Adds the problems of a ConfigError raised within it to the list."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def environment_number(name: str, default: int, low: int = 1, high: int = 1_000_000) -> int:
    """Reads a number from the environment. Raises ConfigError for anything else."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(
            f"{name} = {text!r} in the environment: expected an integer from {low} to {high}"
        )
    return int(text)


def _default_processes(device: str) -> int:
    """The number of processes: one per CUDA device, or a single one on the CPU.

    Without a driver there is no need to import torch.
    """
    if device == "cpu" or not any(Path("/dev", name).exists() for name in DRIVERS):
        return 1
    import torch

    return max(1, torch.cuda.device_count())
