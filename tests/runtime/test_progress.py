"""Phases: whoever listens gets each mark. Progress: lines per quarter in a log."""

from __future__ import annotations

import time

from titanlite.observe.step_times import BESIDE, PARTS
from titanlite.runtime import phases
from titanlite.runtime.phases import Phase, mark_phase
from titanlite.runtime.progress import progress_bar


def test_a_mark_reaches_all_listeners(monkeypatch):
    monkeypatch.setattr(phases, "listeners", [])
    seen: list[Phase] = []
    phases.add_listener(seen.append)
    phases.add_listener(seen.append)
    mark_phase(Phase.UPDATE)
    phases.remove_listener(seen.append)
    mark_phase(Phase.BACKWARD)
    assert seen == [Phase.UPDATE, Phase.UPDATE, Phase.BACKWARD]


def test_each_phase_has_its_own_text_and_a_part_that_step_times_know():
    texts = [phase.text for phase in Phase]
    assert len(set(texts)) == len(texts)
    assert {phase.part for phase in Phase} <= {*PARTS, *BESIDE}


def test_a_log_gets_a_line_per_quarter(capsys):
    with progress_bar(100, "converting") as bar:
        bar.start_t -= 10  # as if it had begun 10 s ago
        bar.last_print_t -= 10
        for _ in range(100):
            bar.update(1)
            bar.last_print_t -= 1
    err = capsys.readouterr().err
    assert [line.split("%")[0].split()[-1] for line in err.splitlines()] == [
        "25",
        "50",
        "75",
        "100",
    ]
    assert err.startswith("converting: ")
    assert "\r" not in err


def test_a_short_job_shows_nothing(capsys):
    started = time.monotonic()
    with progress_bar(10, "converting") as bar:
        bar.update(10)
    assert time.monotonic() - started < 1
    assert capsys.readouterr().err == ""


def test_a_job_of_unknown_size_says_every_minute_how_much_it_did(capsys):
    with progress_bar(None, "reading") as bar:
        bar.start_t -= 300
        bar.last_print_t -= 300
        bar.update(5_000_000)
        assert capsys.readouterr().err == ""
        bar.printed -= 61
        bar.last_print_t -= 1
        bar.update(1_000_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reading: 6.00MB [05:")
    assert "kB/s" in line


def test_a_long_job_says_every_minute_how_far_it_is(capsys):
    with progress_bar(10_000, "tokenising") as bar:
        bar.start_t -= 300
        bar.last_print_t -= 300
        bar.update(100)
        assert capsys.readouterr().err == ""
        bar.printed -= 61
        for _ in range(3):
            bar.last_print_t -= 1
            bar.update(100)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenising:   2%")
    assert "[05:" in line  # and the time that is left, and the speed
