"""The report in a terminal."""

from __future__ import annotations

import numpy as np
from messages import assert_mentions
from report_runs import CONFIG, HOSTILE, write_run

from titanlite.tools.report.run_data import Column, Run, read_run
from titanlite.tools.report.text_report import sparkline, text_report


def text_of(runs: list[Run], blocks: bool = True) -> str:
    return text_report(runs, blocks)


def test_what_it_says(tmp_path):
    text = text_of([read_run(write_run(tmp_path / "a"))])
    assert_mentions(
        text, "finished", "3,000 of "
                          "3,000", "validation loss", "bits per byte", "MFU", "1,312,768", "tp 2",
        "Spike at step "
        "1,800", "The mean loss", "restarts after a failure", "last events (10 of 13)", "▁", "█",
    )  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80


def test_two_runs_are_compared_and_ascii_is_enough(tmp_path):
    first = read_run(write_run(tmp_path / "a"))
    second = read_run(
        write_run(tmp_path / "b", config=CONFIG.replace("steps = 3000", "steps = 9000"))
    )
    text = text_of([first, second], blocks=False)
    assert_mentions(text, "Settings that differ", "training.steps", "3000  |  9000")
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 8.3}\n')
    text = text_of([read_run(tmp_path)])
    assert_mentions(text, "training loss", "8.3000", "Too few logged losses")


def test_long_names_and_numbers_fit_into_80_columns(tmp_path):
    rows = [{"step": i, "loss": -1.234e-300 * i, "tps_global": 1e14 + i, "validation/" + "x" * 90 + "/loss": 2.0,
             "validation/b/loss": 1.0} for i in range(1, 60)]  # fmt: skip
    text = text_of([read_run(write_run(tmp_path / ("a" * 100), rows))])
    assert max(map(len, text.splitlines())) <= 80


def test_control_characters_of_files_are_not_printed(tmp_path):
    run = read_run(
        write_run(
            tmp_path / f"a{HOSTILE.replace('/', '')}\x1b[2J",
            config='[model]\nflavor = "\\u001b[31m"\n',
        )
    )
    assert "\x1b" not in text_of([run])


def test_a_constant_column_is_a_flat_line():
    """Whatever the sums of many equal values are rounded to."""
    for value in (0.1, 3e-4, -7.7, 0.0):
        column = Column(np.arange(50_000), np.full(50_000, value))
        assert sparkline(column, 47) == "▁" * 47
    rising = Column(np.arange(50_000), 1.0 + 1e-6 * np.arange(50_000) / 50_000)
    assert sparkline(rising, 40)[-1] == "█"


def test_a_sparkline_goes_from_the_first_step_to_the_last():
    column = Column(np.array([0, 50, 100]), np.array([3.0, 2.0, 1.0]))
    line = sparkline(column, 10)
    assert len(line) == 10
    assert line[0] == "█"
    assert line[-1] == "▁"
    assert line.count(" ") == 7
