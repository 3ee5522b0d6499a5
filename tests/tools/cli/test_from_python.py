"""`titanlite.launch`: a run as one call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launches import alive
from messages import refused
from runs import rows

import titanlite
from titanlite.tools.cli import from_python

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def overrides(arguments) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in arguments[1:])


@pytest.fixture(autouse=True)
def other_launcher(monkeypatch):
    """The caller is itself a process of a distributed job."""
    for name, value in {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "NNODES": "4",
        "NODE_RANK": "3",
        "MASTER_ADDR": "x",
    }.items():
        monkeypatch.setenv(name, value)


def running(folder: Path) -> list[int]:
    """The processes with this folder in their command line, except this one."""
    found = [
        path
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and int(path.name) != os.getpid()
    ]
    result = []
    for path in found:
        try:
            if str(folder).encode() in (path / "cmdline").read_bytes() and alive(int(path.name)):
                result.append(int(path.name))
        except OSError:  # it has ended
            continue
    return result


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not (
        (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(folder))
    ):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_from_a_thread(overrides, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("LOG_RANK", "0")
    results = []
    thread = threading.Thread(target=lambda: results.append(titanlite.launch("debug", overrides)))
    thread.start()
    thread.join(180)
    (result,) = results
    assert (result.exit_code, result.stopped, result.folder) == (0, False, tmp_path / "debug")
    last = [row for row in rows(result.folder) if "loss" in row][-1]
    del last["time"]  # the validation after it has another one
    assert last.items() <= result.metrics.items()
    assert "CPU x 1" in capfd.readouterr().out
    assert not running(tmp_path)


def test_what_is_on_the_command_line(monkeypatch, tmp_path):
    seen = []

    def call(argv, variables, timeout):
        seen.append((argv, variables, timeout))
        return 75, []

    monkeypatch.setattr(from_python, "_call", call)
    monkeypatch.setenv("NGPU", "5")
    nested = {
        "training": {"steps": 3, "batch_ramp": ""},
        "optimizer.betas": (0.9, 0.99),
        "compile.enabled": False,
    }
    nested |= {"run.folder": tmp_path, "validation.prompts": ["a, b", "c"]}
    result = titanlite.launch("debug", nested, env={"NNODES": "2"}, timeout=9)
    argv, variables, timeout = seen[0]
    assert argv == [
        "debug",
        "--training.steps=3",
        "--training.batch_ramp=",
        "--optimizer.betas=[0.9, 0.99]",
        "--compile.enabled=false",
        f"--run.folder={tmp_path}",
        '--validation.prompts=["a, b", "c"]',
    ]
    assert variables["NNODES"] == "2"
    assert not {"NGPU", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"} & variables.keys()
    assert (timeout, result.stopped, result.metrics) == (9, True, {})


def test_wrong_input_raises_all_its_problems(tmp_path):
    with refused("training.step ", "training.steps"):
        titanlite.launch("debug", {"training.step ": 3})
    with refused("data.sources", "TOML"):
        titanlite.launch("debug", {"data": {"sources": [{"path": "x"}]}})
    with refused("training.steps = None", "leave the key out"):
        titanlite.launch("debug", {"training.steps": None})
    for wrong in (0, True, "2"):
        with refused(f"processes = {wrong!r}", "integer from 1"):
            titanlite.launch("debug", processes=wrong)
    # The launcher finds these, in the child
    with refused("data.tokenizer", "absent.model", "data.path", "absent.txt"):
        titanlite.launch(
            "debug", {"data.tokenizer": "absent.model", "data.path": tmp_path / "absent.txt"}
        )
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = titanlite.lunch


def test_the_package_imports_only_its_version_until_it_is_used():
    code = (
        "import sys, titanlite; print(sorted(m for m in sys.modules if "
        "m.startswith(('titanlite', 'torch'))))"
    )
    code += "; titanlite.launch; assert 'torch' not in sys.modules"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "['titanlite', 'titanlite.runtime', 'titanlite.runtime.version']"


@pytest.mark.slow
def test_a_time_out_saves_and_the_same_call_continues(overrides, tmp_path):
    overrides |= {"training.steps": "100000", "metrics.log_freq": "1"}
    result = titanlite.launch("debug", overrides, processes=2, timeout=25)
    assert (result.exit_code, result.stopped) == (75, True)
    assert not running(tmp_path)
    step = result.metrics["step"]
    assert [path.name for path in (result.folder / "checkpoints").glob("step-*")] == [
        f"step-{step}"
    ]
    overrides["training.steps"] = str(step + 2)
    again = titanlite.launch("debug", overrides, processes=2)
    assert (again.exit_code, again.metrics["step"]) == (0, step + 2)
    assert [row["step"] for row in rows(again.folder) if "loss" in row] == list(range(1, step + 3))


CALLER = """
import signal, sys, titanlite
signal.signal(signal.SIGINT, signal.default_int_handler)
overrides = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])
try:
    titanlite.launch("debug", overrides, processes=2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_ends_leaves_no_process(arguments, tmp_path, number):
    """Killed, it cannot end its run; the run ends by itself.

    Interrupted, it waits for the run. Both times it saves.
    """
    command = [
        sys.executable,
        "-c",
        CALLER,
        *arguments,
        "--training.steps=100000",
        "--metrics.log_freq=1",
    ]
    caller = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_for_step(tmp_path / "debug", 2)
        caller.send_signal(number)
        caller.wait(120)
        deadline = time.monotonic() + 120
        while running(tmp_path):
            assert number == signal.SIGKILL, "it has not waited"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert list((tmp_path / "debug/checkpoints").glob("step-*"))
        assert ("interrupted" in caller.communicate()[0]) == (number == signal.SIGINT)
    finally:
        caller.kill()
        for pid in running(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_package_has_the_function_and_the_error_that_it_raises():
    import titanlite
    from titanlite.runtime.errors import ConfigError as Raised

    assert titanlite.ConfigError is Raised
    with pytest.raises(titanlite.ConfigError, match=r"training\.steps = -1"):
        titanlite.launch("debug", {"training.steps": -1})
