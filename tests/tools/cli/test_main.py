"""The command `titanlite`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from messages import assert_mentions

import titanlite
from titanlite.config.load import load_config
from titanlite.tools.cli import train_command
from titanlite.tools.cli.main import COMMANDS, limit_spinning, main

ROOT = Path(__file__).parents[3]


def test_usage_and_unknown_commands(capsys):
    assert main([]) == 0
    assert "generate CHECKPOINT" in capsys.readouterr().out
    assert main(["generat"]) == 2
    errors = capsys.readouterr().err
    assert_mentions(errors, "'generat'", "did you mean generate?", "titanlite --help")
    assert len(errors.splitlines()) == 1
    for argv, meant in ((["checkpoint", "lst"], "list"), (["tokenizer", "trian"], "train")):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert_mentions(error, argv[1], f"did you mean {meant}?")
        assert error.count("\n") == 1


def test_the_version_is_that_of_the_package_and_of_torch(capsys):
    torch = importlib.metadata.version("torch")
    expected = f"titanlite {titanlite.__version__} (torch {torch}, Python {sys.version.split()[0]})"
    for arguments in (["--version"], ["train", "--version"]):  # the second is run_train.sh's
        assert main(arguments) == 0
        assert capsys.readouterr().out == expected + "\n"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == titanlite.__version__


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


class Parsed(Exception):
    """The arguments of a command were parsed."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_ends_with_examples_that_parse(name, capsys, monkeypatch):
    assert main([name, "--help"]) == 0
    text, _, examples = capsys.readouterr().out.rpartition("\nexamples:\n")
    assert not re.search(r"error: |default: *(None|\))", text)
    shown = examples.splitlines()
    assert shown
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_end(self, *arguments, **names):
        _, rest = parse(self, *arguments, **names)
        load_config(rest)  # raises ConfigError for what is neither an option nor a key
        raise Parsed

    def launch(argv):
        load_config(argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_end)
    monkeypatch.setattr(train_command, "launch", launch)
    for line in shown:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("titanlite", name)
        if train_command.PRINT_CONFIG in arguments:
            assert main([name, *arguments]) == 0
        else:
            with pytest.raises(Parsed):
                main([name, *arguments])


def test_help_after_a_wrong_argument_is_an_error(capsys):
    assert main(["checkpoint", "lst", "--help"]) == 2
    assert "examples:" not in capsys.readouterr().out


def test_the_help_of_train_lists_the_keys(capsys):
    assert main(["train", "debug", "--help"]) == 0
    assert_mentions(capsys.readouterr().out, "--training.steps", "--print-config")


def test_print_config_prints_what_reads_back(capsys, tmp_path):
    assert main(["train", "cpu_25m", "--training.steps=3", "--print-config"]) == 0
    path = tmp_path / "resolved.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config([str(path)]) == load_config(["cpu_25m", "--training.steps=3"])


@pytest.mark.parametrize(
    "command", [["train", "--print-config"], ["plan", "--estimate"]], ids=["config", "plan"]
)
def test_a_warmup_longer_than_the_run_is_a_warning(capsys, command):
    name, option = command
    assert main([name, "debug", "--training.steps=20", option]) == 0
    printed = capsys.readouterr()
    words = "warning: schedule.warmup_steps = 30, and the run has 20 steps"
    assert words in " ".join((printed.out + printed.err).split())
    assert main([name, "debug", "--training.steps=31", option]) == 0
    printed = capsys.readouterr()
    assert "warning" not in printed.out + printed.err


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
        (
            ["train", "--print-config", "--trainig.steps=3"],
            ("trainig.steps", "did you mean training.steps?"),
        ),
        (["generate", "Qwen/Qwen3-0.6B"], ("hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",)),
        (["train", "Qwen/Qwen3-0.6B"], ("hf download Qwen/Qwen3-0.6B",)),
        (
            ["prepare", "README.md", "--tokenizer=Qwen/Qwen3-0.6B", "--out=x"],
            ("--tokenizer = ", "nothing is downloaded", "hf download Qwen/Qwen3-0.6B"),
        ),
        (["prepare", "debug", "--data.path=allenai/c4"], ("write hf:allenai/c4",)),
        (
            ["prepare", "debug", "--data.tokenizer=Qwen/Qwen3-0.6B"],
            ("hf download Qwen/Qwen3-0.6B",),
        ),
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
