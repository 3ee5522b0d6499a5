"""Whom the watchdog blames, from beats alone; whole runs that hang are in tests/e2e/test_hang.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from titanlite.distributed import blame
from titanlite.distributed.blame import Heartbeat, diagnose_progress, diagnose_silence, locate

FOLDER = Path("hang")


def beat(rank: int, **facts) -> Heartbeat:
    known = {"progress": 7, "phase": '"update" of step 3', "limit": 100.0, "key": "comm.step_timeout_seconds"}
    return Heartbeat(rank, f"node {rank // 2}", f"host{rank // 2}", 1000 + rank, **{**known, "still": 101.0, **facts})


def beats(*all_: Heartbeat, ages: tuple[float, ...] = ()) -> dict[int, tuple[Heartbeat, float]]:
    return {b.rank: (b, age) for b, age in zip(all_, ages or (0.5,) * len(all_), strict=True)}


def test_who_has_come_least_far_is_named():
    own = beat(0)
    verdict = diagnose_progress(beats(own, beat(1), beat(2, progress=6), beat(3)), own, FOLDER)
    assert verdict.message.startswith("rank 2 (host host1, pid 1002)")
    assert verdict.speakers == [0, 2]
    assert verdict.frozen == []


def test_among_equals_the_one_outside_a_collective_is_named():
    own = beat(0, waiting=2)
    verdict = diagnose_progress(beats(own, beat(1, place="train.py:5"), beat(2, waiting=1)), own, FOLDER)
    assert verdict.message.startswith("rank 1 (host host0, pid 1001) at train.py:5: standing still in")
    both = diagnose_progress(beats(own, beat(1, waiting=2)), own, FOLDER)
    assert both.message.startswith("all 2 ranks, rank 0 (host host0, pid 1000)")


def test_nobody_is_named_while_the_slowest_may_take_longer():
    own = beat(0)
    assert diagnose_progress(beats(own, beat(1, progress=6, limit=300.0)), own, FOLDER) is None
    assert diagnose_progress(beats(own, beat(1, still=99.0)), own, FOLDER) is None


def test_who_has_left_is_not_missed():
    own = beat(0, still=1.0)
    gone = beat(1, progress=5, left=True)
    assert diagnose_progress(beats(own, gone), own, FOLDER) is None
    assert diagnose_silence(beats(beat(0), gone, ages=(0.0, 500.0)), beat(0), FOLDER) is None


def test_silence_comes_before_progress():
    own = beat(0, progress=6)
    found = beats(own, beat(1, still=0.0), beat(2), ages=(0.0, 101.0, 0.5))
    assert diagnose_progress(found, own, FOLDER) is None
    verdict = diagnose_silence(found, own, FOLDER)
    assert verdict.message.startswith("rank 1 (host host0, pid 1001), last heard in")
    assert verdict.speakers == [0, 2]
    assert verdict.frozen == [("node 0", 1001)]


def test_a_broken_store_ends_no_run_that_goes_on():
    own = beat(0, still=1.0)
    assert diagnose_silence(beats(own, beat(1), ages=(0.0, 500.0)), own, FOLDER) is None


def test_when_rank_0_is_silent_one_process_of_each_node_says_so(monkeypatch):
    silent = beat(0)
    for rank, local_rank, speaks in ((1, 1, True), (2, 0, True), (3, 1, False)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        own = replace(beat(rank), still=101.0)
        verdict = diagnose_silence(beats(silent, own, ages=(101.0, 0.0)), own, FOLDER)
        assert verdict.speakers == ([rank] if speaks else [])


def test_the_line_of_ours_is_found():
    waiting, place, debugged = locate(sys._getframe())
    assert (waiting, debugged) == (0, False)
    assert place.startswith("tests/distributed/test_blame.py:")


def test_an_installed_package_knows_its_own_lines(monkeypatch):
    monkeypatch.setattr(blame, "PACKAGE", Path("/env/site-packages/titanlite"))

    def place_of(filename: str) -> str:
        scope = {"locate": locate, "sys": sys}
        exec(compile("\nplace = locate(sys._getframe())[1]", filename, "exec"), scope)
        return scope["place"]

    assert place_of("/env/site-packages/titanlite/program/train.py") == "titanlite/program/train.py:2"
    assert place_of("/env/site-packages/other/file.py") == "/env/site-packages/other/file.py:2"
