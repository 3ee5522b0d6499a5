"""Progress: lines per quarter in a log, nothing for short jobs."""

from __future__ import annotations

import time

from titanlite.config.progress import progress_bar


def test_a_log_gets_a_line_per_quarter(capsys):
    with progress_bar(100, "converting") as bar:
        bar.start_t -= 10  # as if it had begun 10 s ago
        bar.last_print_t -= 10
        for _ in range(100):
            bar.update(1)
            bar.last_print_t -= 1
    err = capsys.readouterr().err
    assert [line.split("%")[0].split()[-1] for line in err.splitlines()] == ["25", "50", "75", "100"]
    assert err.startswith("converting: ")
    assert "\r" not in err


def test_a_short_job_shows_nothing(capsys):
    started = time.monotonic()
    with progress_bar(10, "converting") as bar:
        bar.update(10)
    assert time.monotonic() - started < 1
    assert capsys.readouterr().err == ""
