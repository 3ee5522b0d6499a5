"""Phases: whoever listens gets each mark, and each phase has its own text."""

from __future__ import annotations

from titanlite.observe.step_times import BESIDE, PARTS
from titanlite.runtime import phases
from titanlite.runtime.phases import Phase, mark_phase


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
