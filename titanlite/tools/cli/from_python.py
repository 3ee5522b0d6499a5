"""`titanlite.launch`: starts a training run by one call from Python.

What it is: starts `titanlite train` as a child process, waits for it, and returns what the run
left. The child is the launcher of `launch.py`, which starts the training processes and ends when
all of them have ended.
Why it is a child: the caller may be a notebook, a thread, or a worker of Ray, with signal handlers,
threads and a process group that a training process must not share. The caller does not import
torch.
What it costs: the start of one more Python process.

The child does not outlive its caller: when its parent process has ended, it stops the run as
SIGTERM does. The training processes do the same when the child has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.config.load import load_config
from titanlite.observe.metrics_file import RowReader
from titanlite.runtime import interpreter
from titanlite.runtime.errors import (
    EXIT_CONFIG,
    EXIT_STOPPED,
    LAUNCHED,
    LAUNCHER,
    LISTENER,
    ConfigError,
)
from titanlite.tools.cli.processes import RANK_VARIABLES

# Variables that a launcher of the caller has set for the caller's own processes
OTHERS = (
    *RANK_VARIABLES,
    "NNODES",
    "NODE_RANK",
    "GROUP_RANK",
    "NGPU",
    LAUNCHED,
    LAUNCHER,
    LISTENER,
    "TORCHELASTIC_RUN_ID",
)
PERIOD = 0.5  # seconds between the child's checks of its parent


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path  # with checkpoints, metrics.jsonl and log.txt
    # 0: finished; 75: stopped after saving, and the same call continues it; else: failed
    exit_code: int
    metrics: dict[str, Any] = field(default_factory=dict)  # last values of metrics.jsonl

    @property
    def stopped(self) -> bool:
        """Whether the run stopped on request, and can be continued."""
        return self.exit_code == EXIT_STOPPED


def launch(
    config: str | os.PathLike[str] = "debug",
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Result:
    """Trains on this node until the run ends, and returns its folder, exit code and last metrics.

    `config`: a flavor or the path of a TOML file. `overrides`: values of keys, as
    {"training.steps": 100} or, by section, {"training": {"steps": 100}}. `processes`: how many, by
    default one per GPU, or one. `env`: environment variables of the run; for one of several nodes
    NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. `timeout`: seconds after which the run is
    stopped. Under an active run of MLflow, the one of the sink `mlflow` becomes its child.

    The run prints to the caller's standard output, and can be stopped by Ctrl-C. Any exception that
    ends the call first stops the run, which saves, and waits for its end; a second one kills its
    processes.

    Raises ConfigError for wrong input that is found before training processes start. What they find
    is printed, and the exit code is 2.
    """
    values = dict(_keys(overrides or {}, ""))
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise ConfigError(
            [
                f"{key} = None: expected a value; leave the key out for its default"
                for key in missing
            ]
        )
    argv = [os.fspath(config), *(f"--{key}={_text(value)}" for key, value in values.items())]
    run = load_config(argv).run  # raises the errors of the configuration without starting a process
    if processes is not None:
        is_integer = isinstance(processes, int) and not isinstance(processes, bool)
        if not is_integer or processes < 1:
            raise ConfigError(f"processes = {processes!r}: expected an integer from 1")

    # Later variables replace earlier ones, so `env` is last
    variables = {name: value for name, value in os.environ.items() if name not in OTHERS}
    variables |= _mlflow_parent()
    if processes:
        variables["NGPU"] = str(processes)
    if env:
        variables |= {name: str(value) for name, value in env.items()}

    code, problems = _call(argv, variables, timeout)
    if problems:
        raise ConfigError(problems)
    folder = Path(run.folder, run.name).absolute()
    return Result(folder, code, _last_values(folder / "metrics.jsonl"))


def _keys(overrides: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Yields section.key and value, from names with a dot and from nested mappings."""
    for name, value in overrides.items():
        if isinstance(value, Mapping) and not section and "." not in name:
            yield from _keys(value, f"{name}.")
        else:
            yield section + name, value


def _text(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    try:
        return json.dumps(value, default=lambda number: number.item())  # of numpy
    except (AttributeError, ValueError):
        return repr(value)  # the schema has no such type either, and its error names the key


def _mlflow_parent() -> dict[str, str]:
    """MLflow's variables for processes that belong to the caller's active run; none without one."""
    mlflow = sys.modules.get("mlflow")  # not imported: no run is active
    active = mlflow.active_run() if mlflow else None
    if mlflow is None or active is None:
        return {}
    return {"MLFLOW_RUN_ID": active.info.run_id, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}


def _call(
    argv: list[str], variables: dict[str, str], timeout: float | None
) -> tuple[int, list[str]]:
    """Runs the child to its end. Returns the exit code and the problems of the input."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as problems:
        command = interpreter.call(child, os.getpid(), problems.fileno(), *argv)
        # In another session, so that Ctrl-C reaches only the caller, which forwards it.
        process = subprocess.Popen(
            command,
            env=variables | interpreter.environment(variables),
            stdin=subprocess.DEVNULL,
            pass_fds=[problems.fileno()],
            start_new_session=True,
        )
        code = _wait(process, timeout)
        problems.seek(0)
        return code, json.loads(problems.read() or "[]")


def _wait(process: subprocess.Popen[bytes], timeout: float | None) -> int:
    """Waits for the child and returns its exit code.

    After `timeout` seconds, and if an exception ends the waiting, the child is stopped first.
    """
    try:
        return _exit_code(process.wait(timeout))
    except subprocess.TimeoutExpired:
        pass
    except BaseException:  # KeyboardInterrupt, or what a signal handler of the caller raises
        _stop(process)
        raise
    return _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Requests the end of the run, which saves, and waits for it.

    An exception while it waits kills the run.
    """
    process.terminate()
    try:
        code = process.wait()
    except BaseException:
        time.sleep(1)  # for the launcher, signals within a second are one request
        process.terminate()
        process.wait()
        raise
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        # The signal itself has ended the child, before it could start training processes.
        return EXIT_STOPPED
    return _exit_code(code)


def _exit_code(code: int) -> int:
    """The exit code as in a shell: 128 + its number after a signal."""
    if code < 0:
        return 128 - code
    return code


def _last_values(path: Path) -> dict[str, Any]:
    """The last value of each column; empty if the run has logged nothing."""
    values: dict[str, Any] = {}
    reader = RowReader(path)
    while rows := reader.read():
        for row in rows:
            values |= row
    return values


def child(caller: str, file_number: str, *argv: str) -> int:
    """Trains in the child, and stops the run when the process `caller` has ended.

    Writes problems of the input to a file.
    """
    from titanlite.tools.cli.launch import launch as train
    from titanlite.tools.cli.main import limit_spinning

    threading.Thread(target=_follow, args=(int(caller),), daemon=True).start()
    limit_spinning()
    problems: list[str] = []
    try:
        return train(list(argv))
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        problems = [f"{error.filename or 'titanlite'}: {error.strerror or error}"]
    with open(int(file_number), "w", encoding="utf-8") as file:
        json.dump(problems, file)
    return EXIT_CONFIG


def _follow(caller: int) -> None:
    """Stops the run when the caller has ended; runs in a thread of the child."""
    while os.getppid() == caller:
        time.sleep(PERIOD)
    os.kill(os.getpid(), signal.SIGTERM)
