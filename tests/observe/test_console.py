"""The console: a plain line in files, and a table on a terminal."""

from __future__ import annotations

import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launches import ROOT, environment

from titanlite.observe.console import (
    TableFormatter,
    duration,
    fixed,
    short_duration,
    significant,
    step_line,
    validation_row,
)
from titanlite.observe.logging import log_to_file, setup_logging

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ROW = {
    "step": 120, "steps": 800, "loss": 3.14159, "grad_norm": 0.98765, "lr": 3e-4,
    "tps": 123456.7, "tflops": 1.2345, "mfu": None, "memory_gib": 0.512, "data_percent": 12.34, "data_wait_percent": 1.2, "eta": 754.0,
}  # fmt: skip
EXTREMES = [
    {},
    {"mfu": 41.23},
    {"step": 99_999, "steps": 99_999, "eta": 1e8},
    {"step": 9_999_999, "steps": 9_999_999},
    {"loss": math.nan, "grad_norm": math.inf},
    {
        "loss": 123456.789,
        "grad_norm": 1e12,
        "tps": 12_345_678.0,
        "tflops": 12345.6,
        "memory_gib": 1234.5,
    },
    {"eta": None},
    {"data_percent": 1e6, "data_wait_percent": 100.0, "tflops": 1e-7, "lr": 0.0, "eta": 0.0},
]


def record(message: str, level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("titanlite", level, "", 0, message, None, None)
    vars(made).update(extra)
    return made


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_the_plain_line():
    assert step_line("step 120/800", ROW) == (
        "step 120/800  loss 3.1416  grad_norm 0.988  lr 3.00e-04  "
        "tps 123,457  tflops 1.23  mfu n/a  memory 0.51GiB  "
        "epoch 0.12  wait 1.2%  eta 12:34"
    )
    assert "  mfu 41.2%  " in step_line("", ROW | {"mfu": 41.23})
    assert "  epoch 4.00  " in step_line("", ROW | {"data_percent": 400.0})
    assert step_line("", ROW | {"eta": None}).endswith("  eta compiling")


def test_durations():
    assert [duration(s) for s in (0, 59.6, 65, 3599, 7384, 90_000)] == [
        "0:00", "1:00", "1:05", "59:59", "2:03:04", "1 d 1:00:00",
    ]  # fmt: skip
    assert [short_duration(s) for s in (7384, 86_399, 864_000)] == ["2:03:04", "23:59:59", "10.0d"]


def test_short_numbers():
    found = [fixed(x, 4, 8) for x in (3.14159, 1234.56, 1e6, 1e9, math.nan)]
    assert found == ["3.1416", "1,234.56", "1.0e+06", "1.0e+09", "nan"]
    assert fixed(123456.0, 2, 5) == "1e+05"
    assert [significant(x, 6) for x in (0.0062345, 0.01, 123.4, 12345.6, 1e-7)] == [
        "0.0062",
        "0.0100",
        "123",
        "12,346",
        "1e-07",
    ]


def test_a_table_of_80_columns(terminal):
    lines = TableFormatter("").format(record("", row=ROW)).splitlines()
    assert lines == [
        " step/800     loss grad_norm       lr     tps TFLOPS   GiB epoch wait       eta",
        "      120   3.1416     0.988 3.00e-04 123,457   1.23  0.51  0.12   1%     12:34",
    ]


@pytest.mark.parametrize("changed", EXTREMES, ids=str)
@pytest.mark.parametrize("columns", [1, 20, 33, 60, 79, 80, 200])
@pytest.mark.parametrize("prefix", ["", "[rank 12] "])
def test_rows_fit_and_stay_under_their_header(monkeypatch, columns, changed, prefix):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    header, row = TableFormatter(prefix).format(record("", row=ROW | changed)).splitlines()
    assert len(header) == len(row) <= max(24 + len(prefix), min(columns, 80 + len(prefix)))
    titles = header.removeprefix(prefix).split()
    assert len(row.removeprefix(prefix).split()) == len(titles) >= 2
    assert titles[1] == "loss"


def header_lines(formatter: TableFormatter, *messages: str) -> list[str]:
    """What each line is: a header, a row, or a message."""
    kinds = []
    for message in messages:
        text = formatter.format(record("", row=ROW) if message == "row" else record(message))
        kinds += [
            "header" if "loss" in line else "row" if "3.1416" in line else line
            for line in text.splitlines()
        ]
    return kinds


def test_a_header_now_and_then_and_after_other_messages(terminal):
    formatter = TableFormatter("")
    kinds = header_lines(formatter, *["row"] * 41)
    assert [i for i, kind in enumerate(kinds) if kind == "header"] == [0, 21, 42]
    assert header_lines(formatter, "saved", "row", "saved", "row") == [
        "saved",
        "row",
        "saved",
        "row",
    ]
    assert header_lines(formatter, "row", "row", "saved", "row") == [
        "row",
        "row",
        "saved",
        "header",
        "row",
    ]
    assert header_lines(formatter, "row") == ["row"]


def test_a_header_when_the_terminal_changes_its_width(terminal, monkeypatch):
    formatter = TableFormatter("")
    formatter.format(record("", row=ROW))
    monkeypatch.setenv("COLUMNS", "40")
    assert len(formatter.format(record("", row=ROW)).splitlines()) == 2


@pytest.mark.parametrize("columns", [24, 80])
def test_validation_is_a_row(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    values = {"loss": 8.3218, "bits_per_byte": 4.4321, "perplexity": 4112.34}
    text = TableFormatter("").format(record("", validation=(0, 800, "python-stdlib", values)))
    whole = "        0   8.3218  validation python-stdlib  bits/byte 4.432  perplexity 4,112"
    assert text == whole[:columns]
    assert len(validation_row(80, 0, 800, "\x1b[2J" * 20, {"ema_loss": 1.0})) <= 80
    assert "\x1b" not in validation_row(80, 0, 800, "\x1b[2J", {"ema_loss": 1.0})
    assert "averaged weights" in validation_row(80, 0, 800, "web", {"ema_loss": 1.0})


def test_colours_mark_what_needs_attention(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    formatter = TableFormatter("")

    def coloured(made: logging.LogRecord) -> list[str]:
        return re.findall(r"\x1b\[[1-9][0-9;]*m\s*([^\x1b]*)\x1b\[0m", formatter.format(made))

    header, *cells = coloured(record("", row=ROW))
    assert header.startswith("step/800")
    assert cells == []
    assert coloured(record("", row=ROW | {"loss": math.nan, "data_wait_percent": 34.0})) == [
        "nan",
        "34%",
    ]
    assert coloured(record("careful", logging.WARNING)) == ["careful"]
    assert coloured(record("stage 0")) == []


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colours(monkeypatch, name, value):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    text = TableFormatter("").format(record("careful", logging.WARNING))
    assert text == "careful"


def on_a_terminal(command: list[str], **more: str) -> str:
    """The output of a process whose standard output is a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**more), stdout=theirs, stdin=subprocess.DEVNULL
    )
    os.close(theirs)
    parts, deadline = [], time.monotonic() + 120
    try:
        while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0]:
            parts.append(os.read(ours, 4096))
    except OSError:  # the terminal is closed
        process.wait(timeout=30)
    finally:
        os.close(ours)
        process.kill()
    return b"".join(parts).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [["train.py"], pytest.param(["-m", "titanlite", "train"], marks=pytest.mark.slow)],
    ids=["", "launcher"],
)
def test_a_run_on_a_terminal_and_its_files(arguments, tmp_path, program):
    """A table on the terminal, which the launcher hands on to the processes; plain lines in the
    file.
    """
    more = ["--validation.freq=0", "--training.steps=3"]
    settings = {"COLUMNS": "80", "TERM": "xterm", "NGPU": "1", "NO_COLOR": ""}
    shown = on_a_terminal([sys.executable, *program, *arguments, *more], **settings)
    lines = COLOUR.sub("", shown).splitlines()
    (header,) = [i for i, line in enumerate(lines) if "grad_norm" in line]
    assert lines[header].split()[:3] == ["step/3", "loss", "grad_norm"]
    assert [line.split()[0] for line in lines[header + 1 : header + 4]] == ["1", "2", "3"]
    assert not re.search(r"loss \d", shown)
    text = (tmp_path / "debug/log.txt").read_text()
    assert len(re.findall(r"step \d/3  loss \S+  grad_norm \S+  lr \S+  tps ", text)) == 3
    assert "\x1b" not in text


def test_debug_messages_are_in_the_file_and_on_request_on_the_console(
    monkeypatch, capsys, tmp_path
):
    logger = logging.getLogger("titanlite")
    monkeypatch.setenv("LOG_RANK", "0")
    try:
        for level in ("", "debug"):
            monkeypatch.setenv("LOG_LEVEL", level)
            setup_logging(0)
            log_to_file(Path(tmp_path, f"log{level}.txt"))
            logger.debug("12 tensors")
            assert capsys.readouterr().out == ("12 tensors\n" if level else "")
            assert "DEBUG 12 tensors" in Path(tmp_path, f"log{level}.txt").read_text()
    finally:
        logger.handlers.clear()
