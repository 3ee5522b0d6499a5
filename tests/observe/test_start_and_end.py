"""The end of a run, and the line that compares it with its plan."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from messages import assert_mentions
from runs import train_run, train_until

import train
from titanlite.parallel import step
from titanlite.runtime import interpreter, shell_command
from titanlite.runtime.shell_command import titanlite_command
from titanlite.tools.report.run_data import read_run


def names(folder) -> list[tuple[str, int]]:
    return [(event.name, event.step) for event in read_run(folder).events]


def test_a_run_writes_its_events_and_names_its_report_last(pool, arguments, tmp_path):
    folder = tmp_path / "debug"
    assert pool.run(1, train_until, 3, arguments) == [75]
    assert names(folder) == [("start", 0), ("signal", 3), ("save", 3), ("end", 3)]
    assert "stopped, can be resumed" in (folder / "report.html").read_text()
    assert pool.run(2, train_run, arguments) == [0, 0]
    assert names(folder)[4:] == [("resume", 3), ("start", 3), ("save", 6), ("end", 6)]
    (data,) = re.findall(r'id="data">(.*?)</script>', (folder / "report.html").read_text())
    assert ["state", "finished"] in json.loads(data)["table"]
    assert [chart["title"] for chart in json.loads(data)["charts"]][:2] == [
        "Loss",
        "Validation, bits per byte",
    ]
    assert (
        (folder / "log.txt").read_text().splitlines()[-1].endswith(f"report: {folder}/report.html")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.sliding_window=8"], "attention within a window of 8, "),
        (
            ["--model.sliding_window=8", "--data.document_mask"],
            "attention within documents and a window of 8, ",
        ),
        (["--model.sliding_window=32"], "attention flash, "),
    ],
    ids=str,
)
def test_the_first_line_says_what_attention_is_within(pool, arguments, tmp_path, options, words):
    run = [*arguments, "--training.steps=1", "--training.seq_len=32", *options]
    assert pool.run(1, train_run, run) == [0]
    assert words in (tmp_path / "debug/log.txt").read_text()


def diverge(arguments: list[str]) -> int:
    """train.py's `run`, whose gradient norm is NaN at step 3."""
    original, steps = step.clip_gradients, iter(range(1, 100))
    step.clip_gradients = lambda *values: original(*values) * (torch.nan if next(steps) == 3 else 1)
    try:
        return train.run(arguments)
    finally:
        step.clip_gradients = original


def test_a_run_that_has_diverged_has_a_report(pool, arguments, tmp_path):
    assert pool.run(1, diverge, [*arguments, "--checkpoint.freq=2"]) == [1]
    folder = tmp_path / "debug"
    assert names(folder) == [("start", 0), ("save", 2), ("diverged", 3)]
    assert "ended: training has diverged" in (folder / "report.html").read_text()


def fail_to_report(arguments: list[str]) -> int:
    from titanlite.tools.report import page

    page.STATIC = page.STATIC / "absent"
    return train_run(arguments)


def test_a_run_without_a_report_is_a_run(pool, arguments, tmp_path):
    assert pool.run(1, fail_to_report, [*arguments, "--training.steps=1"]) == [0]
    assert_mentions(
        (tmp_path / "debug/log.txt").read_text(),
        "WARNING schedule.warmup_steps = 2, and the run has 1 steps",
        "WARNING no report was written",
        "done: 1 steps",
    )


def test_the_command_of_the_next_step_works_in_any_folder(tmp_path, monkeypatch):
    """And imports nothing from it: a folder of data may contain a types.py."""
    clone = Path(interpreter.PACKAGES)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(shell_command, "package_variable", lambda: f"PYTHONPATH={clone} ")
    monkeypatch.setattr(sys, "executable", f"{clone}/.venv/bin/python")
    assert titanlite_command(clone) == ".venv/bin/python -m titanlite"
    safe_path = " -P" if interpreter.HAS_SAFE_PATH else ""
    expected = f"PYTHONPATH={clone} {clone}/.venv/bin/python{safe_path} -m titanlite"
    assert titanlite_command(tmp_path) == expected
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert titanlite_command(clone) == "titanlite"
