"""`titanlite break`: its options, and a fault from the first line to the last."""

from __future__ import annotations

import io

import pytest
from messages import assert_mentions

from titanlite.tools.cli.main import main
from titanlite.tools.faults import quiz
from titanlite.tools.faults.catalogue import FAULTS
from titanlite.tools.verify.pool import WorkerError


def test_list_has_every_name(capsys):
    assert main(["break", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [fault.name for fault in FAULTS]
    assert main(["break", "--list", "cp-order"]) == 0
    assert capsys.readouterr().out.startswith("cp-order  Gathered keys")


def test_mistakes_are_answered(capsys):
    assert main(["break", "rank-mean"]) == 2
    assert_mentions(capsys.readouterr().err, "rank-mean", "did you mean rank-means?", "--list")
    assert main(["break", "--shwo"]) == 2
    assert_mentions(capsys.readouterr().err, "--shwo", "did you mean --show?")


def test_a_run_that_fails_is_its_message(monkeypatch, capsys):
    def fail(*arguments):
        raise WorkerError("rank 1 did not answer")

    monkeypatch.setattr(quiz, "run_fault", fail)
    assert main(["break", "rope-rows", "--show"]) == 1
    assert "rope-rows: not compared, a process failed\nrank 1" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_terminal_it_asks_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["break", "rope-rows"]) == 0
    output = capsys.readouterr().out
    assert_mentions(output, "is_permuted", "off first: logits")
    assert "Which figure" not in output
