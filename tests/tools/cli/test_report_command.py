"""`titanlite report`."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import assert_mentions
from report_runs import write_run

from titanlite.tools.cli.main import main


@pytest.mark.slow
def test_the_page_is_written_into_the_first_folder_unless_told_otherwise(tmp_path, capsys):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert main(["report", str(first), str(second)]) == 0
    assert Path(capsys.readouterr().out.strip()) == first / "report.html"
    assert "<title>a, b</title>" in (first / "report.html").read_text()
    assert not (second / "report.html").exists()
    assert main(["report", str(second), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_text(tmp_path, capsys):
    assert main(["report", "--text", str(write_run(tmp_path / "a"))]) == 0
    assert_mentions(capsys.readouterr().out, "validation loss", "The mean loss")
    assert not (tmp_path / "a/report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["aa"], ("aa", "no such folder", "did you mean a?")),
        (["empty"], ("empty", "has no metrics.jsonl")),
        (["a", "--txt"], ("--txt", "did you mean --text?")),
        (["a", "--out", "no/such/x.html"], ("no/such/x.html", "--out")),
        (["a"] * 13, ("13 runs", "at most 12")),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert_mentions(error, *expected)
    assert error.count("\n") == 1
