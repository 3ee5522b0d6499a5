"""Which rank the watchdog names, from heartbeats alone; whole runs that hang are in
tests/e2e/test_hang.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from fuzz_samples import Reader, given

from titanlite.distributed import agreement, hang_diagnosis
from titanlite.distributed.hang_diagnosis import (
    SILENT,
    Diagnosis,
    Heartbeat,
    diagnose,
    locate,
    read_heartbeat,
)
from titanlite.observe.waits import timed

FOLDER = Path("hang")


def beat(rank: int, **state) -> Heartbeat:
    known = {
        "progress": 7,
        "phase": '"update" of step 3',
        "limit": 100.0,
        "key": "comm.step_timeout_seconds",
    }
    return Heartbeat(rank, f"host{rank // 2}", 1000 + rank, **{**known, "still": 101.0, **state})


def names(found: Diagnosis | None) -> str:
    """The part of the message that names ranks."""
    return found.message.partition(": ")[0] if found else ""


def test_the_rank_that_has_begun_the_fewest_phases_is_named():
    own = beat(0)
    found = diagnose([own, beat(1), beat(2, progress=6), beat(3)], own, FOLDER)
    assert names(found) == "rank 2 (host host1, pid 1002)"
    assert found.frozen == []
    for part in ('101 s in "update" of step 3', "comm.step_timeout_seconds = 100", "stacks: hang"):
        assert part in found.message


def test_among_equals_the_one_outside_a_collective_is_named():
    own = beat(0, waiting=2)
    found = diagnose([own, beat(1, place="train.py:5"), beat(2, waiting=1)], own, FOLDER)
    assert names(found) == "rank 1 (host host0, pid 1001) at train.py:5"
    both = diagnose([own, beat(1, waiting=2)], own, FOLDER)
    assert names(both) == "rank 0 (host host0, pid 1000), rank 1 (host host0, pid 1001)"
    many = [own, *(beat(rank, waiting=2) for rank in range(1, 20))]
    assert names(diagnose(many, own, FOLDER)).endswith("rank 7 (host host3, pid 1007) and 12 more")


def test_no_rank_is_named_while_the_slowest_may_take_longer():
    own = beat(0)
    assert diagnose([own, beat(1, progress=6, limit=300.0)], own, FOLDER) is None
    assert diagnose([own, beat(1, still=99.0)], own, FOLDER) is None
    assert diagnose([beat(0, waiting=2), beat(1, still=0.0)], own, FOLDER) is None


def test_only_rank_0_judges_progress():
    own = beat(1, progress=6)
    assert diagnose([own, beat(0)], own, FOLDER) is None


def test_silence_comes_before_progress():
    own = beat(0, progress=6)
    gone = beat(1, still=0.0)
    # It may be the cause
    assert diagnose([own, gone.aged(SILENT + 1, own), beat(2)], own, FOLDER) is None
    found = diagnose([own, gone.aged(101.0, own), beat(2)], own, FOLDER)
    assert names(found) == "rank 1 (host host0, pid 1001)"
    assert "frozen or gone" in found.message
    assert found.frozen == [1]


def test_all_that_have_been_silent_for_too_long_are_named():
    own = beat(3)
    others = [beat(rank).aged(age, own) for rank, age in ((0, 101.0), (1, 99.0), (2, 150.0))]
    assert diagnose([own, *others], own, FOLDER).frozen == [0, 2]


def test_silence_is_measured_by_the_shorter_limit():
    """Preparing data has no limit, but a rank that is frozen there blocks the others."""
    own = beat(0)
    gone = beat(1, limit=float("inf"), key="").aged(101.0, own)
    assert "comm.step_timeout_seconds = 100" in diagnose([own, gone], own, FOLDER).message
    assert beat(1).aged(SILENT, own) == beat(1)


def test_a_broken_store_ends_no_run_that_makes_progress():
    own = beat(0, still=1.0)
    assert diagnose([own, beat(1).aged(500.0, own)], own, FOLDER) is None


def test_one_living_rank_of_each_node_prints_the_message():
    nodes = range(2), range(2, 4)
    assert [Diagnosis("", []).speaker(node) for node in nodes] == [0, 2]
    assert [Diagnosis("", [0, 3]).speaker(node) for node in nodes] == [1, 2]
    assert Diagnosis("", [0, 1]).speaker(nodes[0]) == 0  # thawed after the others gave it up


def test_heartbeats_and_diagnoses_travel_as_json():
    sent = beat(0, limit=float("inf"), diagnosis=Diagnosis("message", [1]))
    assert read_heartbeat(json.dumps(asdict(sent)).encode()) == sent


def test_the_line_in_this_repository_is_found():
    waiting, place, debugged = locate(sys._getframe())
    assert (waiting, debugged) == (0, False)
    assert place.startswith("tests/distributed/test_hang_diagnosis.py:")


def test_a_message_that_has_not_come_is_a_wait_for_other_ranks(monkeypatch):
    """The wait itself is in C++, without a frame, so the innermost is that of agreement.py."""
    found = []
    work = SimpleNamespace(wait=lambda timeout: None)
    monkeypatch.setattr(
        dist, "isend", lambda *arguments: found.append(locate(sys._getframe(1))) or work
    )
    agreement.send(torch.zeros(3), 0, agreement.PATIENT)
    assert [waiting for waiting, _, _ in found] == [2, 2]
    assert found[0][1].startswith("titanlite/distributed/agreement.py:")


def test_a_wait_that_is_timed_is_still_a_wait():
    """`waits.py` adds a frame of this package around it, and the place is that of the caller."""
    found = []
    timed(lambda: found.append(locate(sys._getframe(1))), lambda: True, lambda: None)()
    assert found[0][0] == 2
    assert found[0][1].startswith("tests/distributed/test_hang_diagnosis.py:")


def test_an_installed_package_knows_its_own_lines(monkeypatch):
    monkeypatch.setattr(hang_diagnosis, "PACKAGE", Path("/env/site-packages/titanlite"))

    def place_of(filename: str) -> str:
        scope = {"locate": locate, "sys": sys}
        exec(compile("\nplace = locate(sys._getframe())[1]", filename, "exec"), scope)
        return scope["place"]

    assert (
        place_of("/env/site-packages/titanlite/program/train.py") == "titanlite/program/train.py:2"
    )
    assert place_of("/env/site-packages/other/file.py") == "/env/site-packages/other/file.py:2"


def test_every_module_that_waits_for_a_message_counts_as_waiting():
    package = Path(hang_diagnosis.__file__).parents[1]
    waiting = [
        path
        for path in package.rglob("*.py")
        if re.search(r"dist\.(isend|irecv|send|recv)\b", path.read_text())
    ]
    assert waiting
    for path in waiting:
        assert (
            "titanlite." + ".".join(path.relative_to(package).with_suffix("").parts)
            in hang_diagnosis.WAITING
        )


def use_heartbeat(folder: Path, data: bytes) -> None:
    own = Heartbeat(1, "node", 8, still=300.0)
    beat = read_heartbeat(data)
    if beat is not None:
        diagnose([own, beat.aged(5.0, own)], own, folder)
        diagnose([own, beat.aged(1.0, own)], dataclasses.replace(own, rank=0), folder)
        json.dumps(asdict(beat))


BEAT = Heartbeat(
    0,
    "node",
    7,
    1.5,
    3,
    '"training" of step 4',
    100.0,
    "comm.timeout_seconds",
    200.0,
    2,
    "train.py:9",
)
DIAGNOSED = dataclasses.replace(BEAT, diagnosis=Diagnosis("rank 1: no progress", [1]))
FUZZED = {
    "heartbeat": Reader(
        "text",
        given(*(json.dumps(asdict(beat)).encode() for beat in (BEAT, DIAGNOSED))),
        use_heartbeat,
    ),
}
