"""Messages: ours are whole, texts of others are cut visibly; how a rank says that it failed."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from titanlite.runtime.errors import (
    EXIT_LOST,
    ConfigError,
    for_terminal,
    printable,
    reason_of,
    shortened,
)
from titanlite.runtime.failure import lost_connection
from titanlite.tools.cli.main import COMMANDS, main
from titanlite.tools.verify.pool import WorkerError

PATH_MAX = 4096  # bytes, on Linux
NAME_MAX = 255
PACKAGE = Path(__file__).parents[2] / "titanlite"


def test_a_problem_with_two_of_the_longest_paths_is_whole():
    path = ("/" + "p" * NAME_MAX) * (PATH_MAX // (NAME_MAX + 1))
    problem = f"{path}: is not a link to {path}; expected one"
    error = ConfigError([problem, "another"])
    assert error.problems == [problem, "another"]
    assert reason_of(error) == f"{problem}; another"


def test_texts_of_files_are_cut_visibly():
    assert reason_of(ValueError("v" * 1000)) == "v" * 200 + "..."
    assert shortened("value", 5) == "value"
    assert len(ConfigError("x y " * 1_000_000).problems[0]) < 20_000


def test_what_follows_a_long_word_is_shown(capsys):
    word = "w" * 20_000
    problem = f"unknown command '{word}': expected one of {', '.join(COMMANDS)}"
    assert ConfigError(problem).problems == [problem.replace(word, "w" * 200 + "...")]
    for command in ([word], ["plan", "debug", "--gpus", word], ["train", f"--optimizer.lr={word}"]):
        assert main(command) == 2
        assert len(capsys.readouterr().err) < 600


def test_no_word_of_python_about_its_types_reaches_a_message():
    def words(program: str) -> str:
        try:
            eval(program)
        except Exception as error:
            return reason_of(error)
        raise AssertionError

    kind = "a value of another type than expected"
    assert words("[].get('x')") == words("'a' // 4") == words("[][None]") == kind
    assert words("1 // 0") == words("2.0 ** 5000") == "a number that is not possible there"
    assert words("{}['step']") == "it has no 'step'"
    assert words("[][3]") == "a list that is too short"
    assert words("open('/nowhere/x')") == "No such file or directory"


def test_no_file_cuts_the_text_of_an_error_that_may_be_ours():
    """The child process that reads pickles raises none of ours."""
    cutting = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"str\(error\)\)*\[:", path.read_text())
    }
    assert cutting <= {"pickle_reader.py"}


def test_a_terminal_gets_no_control_character_but_tab_and_newline():
    """By the categories of Unicode, in the plane that has them all: controls, halves of characters, other lines; and by hand what
    turns the direction of a text.
    """
    turns = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    for code in range(1 << 16):
        character = chr(code)
        is_control = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or code in turns
        is_kept = not is_control or character in "\t\n"
        shown = for_terminal(character)
        assert (shown == character) == is_kept, hex(code)
        assert is_kept or printable(shown) == shown
    # Spaces and joiners that scripts need, which are not `isprintable`
    assert for_terminal("日\u3000本\xa0👩\u200d💻\n") == "日\u3000本\xa0👩\u200d💻\n"
    assert for_terminal("\x1b[2J\r\x9b1A") == "\\x1b[2J\\r\\x9b1A"


def end_on_rank_1(folder: str) -> None:
    """The others write down what they would print."""
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(9)
    try:
        while True:
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        Path(folder, str(dist.get_rank())).write_text(lost_connection(error, __file__))


def test_one_line_after_another_rank_has_ended(pool, tmp_path):
    with pytest.raises(WorkerError):
        pool.run(3, end_on_rank_1, str(tmp_path), grace=30)
    for path in (tmp_path / "0", tmp_path / "2"):
        line = path.read_text()
        assert line.startswith("lost its connection to another rank at line "), line
        assert "peer" in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            dist.DistNetworkError(
                "Failed to recv, got 0 bytes. Connection was likely closed. Did it crash?"
            ),
            "got 0 bytes",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:1, remote process exited or there was a network error\ny"
            ),
            "remote process exited",
        ),
        (dist.DistStoreError("wait timeout after 300 s"), ""),
        (
            RuntimeError(
                "[gloo/transport/tcp/x.cc:81] Timed out waiting 1800000ms for recv operation to "
                "complete"
            ),
            "",
        ),
        (
            RuntimeError(
                "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. socket: Too many "
                "open files"
            ),
            "",
        ),
        (RuntimeError("Broken pipe"), ""),
        (BrokenPipeError("gloo/transport: Broken pipe"), ""),
    ],
)
def test_what_is_a_lost_connection(error, shown):
    line = lost_connection(error, "train.py")
    assert bool(line) == bool(shown)
    assert shown in line
    assert "\n" not in line


@pytest.mark.parametrize("lost", [True, False])
def test_only_a_lost_connection_has_no_stack_trace(monkeypatch, capfd, lost):
    def main(config):
        raise RuntimeError(
            "gloo/transport: Connection closed by peer [127.0.0.1]:1" if lost else "of its own"
        )

    monkeypatch.setattr(train, "main", main)
    assert train.run(["debug"]) == (EXIT_LOST if lost else 1)
    error = capfd.readouterr().err
    assert ("Traceback" in error) != lost
    assert ("of its own" in error) != lost
