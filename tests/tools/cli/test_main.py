"""The command `titanlite`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from messages import assert_mentions

from titanlite.config.load import load_config
from titanlite.tools.cli.main import limit_spinning, main

ROOT = Path(__file__).parents[3]


def test_usage_and_unknown_commands(capsys):
    assert main([]) == 0
    assert "generate CHECKPOINT" in capsys.readouterr().out
    assert main(["generat"]) == 2
    assert_mentions(capsys.readouterr().err, "'generat'", "did you mean generate?")


def test_python_dash_m():
    result = subprocess.run(
        [sys.executable, "-m", "titanlite", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert "usage: titanlite COMMAND" in result.stdout


@pytest.mark.parametrize("arguments", ["--help", "report --help"])
def test_a_reader_that_closes_the_pipe_gets_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        command = [sys.executable, "-m", "titanlite", *arguments.split()]
        result = subprocess.run(
            command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode in (0, 128 + signal.SIGPIPE)  # 0: argparse ignores such errors
    assert result.stderr == ""


def test_config_prints_what_reads_back(capsys, tmp_path):
    assert main(["config", "cpu_25m", "--training.steps=3"]) == 0
    path = tmp_path / "resolved.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config([str(path)]) == load_config(["cpu_25m", "--training.steps=3"])


def test_prepare_prints_the_folder(capsys, text_file):
    assert main(["prepare", "debug", f"--data.path={text_file}"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert (folder / "manifest.json").exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["generate", "no/such/run"], ("no/such/run", "no such file or folder", "folder")),
        (
            ["prepare", "debug", "--data.path=no/such/text"],
            ("data.path", "no/such/text", "no such file or folder"),
        ),
        (["config", "--trainig.steps=3"], ("trainig.steps", "did you mean training.steps?")),
        (["tokenizer", "train", "no/such/folder/x.model"], ("no/such/folder", "no such folder")),
        (["tokenizer", "train", "train.py"], ("train.py", "exists")),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert_mentions(error, *expected)
    assert error.count("\n") == 1


def test_threads_spin_less_unless_the_environment_says_otherwise(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "1500"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", ["tomli", "tiktoken", "torch"])
def test_an_interpreter_without_a_package(monkeypatch, capsys, name):
    """As Python 3.10 without tomli, or another user's interpreter."""
    find = importlib.util.find_spec

    def load(argv):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    if name == "torch":
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda found: None if found == "torch" else find(found)
        )
    else:
        monkeypatch.setattr("titanlite.tools.cli.launch.load_config", load)
    assert main(["train", "debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {sys.executable}: it has no package {name}; expected Python 3.10"
    )
    assert error.count("\n") == 1


def test_a_missing_module_of_our_own_is_an_error_of_ours(monkeypatch):
    def load(argv):
        raise ModuleNotFoundError("No module named 'titanlite.x'", name="titanlite.x")

    monkeypatch.setattr("titanlite.tools.cli.launch.load_config", load)
    with pytest.raises(ModuleNotFoundError):
        main(["train", "debug"])
