"""Values that change during a run, as text."""

from __future__ import annotations

import pytest
from messages import refused

from titanlite.config.changes import Change, milestones, read_changes


def test_entries_in_steps_and_in_tokens():
    entries = read_changes("a.b", "32 from step 101, 64 by 8 from 4e9 tokens", "", increments=True)
    assert entries == [Change(32, 0, 101, 0), Change(64, 8, 0, 4_000_000_000)]
    assert milestones("0.5 from step 7") == (Change(0.5, 0, 7, 0),)


@pytest.mark.parametrize(
    "entry", ["", "5", "5 from step 2.5", "5 by 0 from step 9", "1e99 from step 9"]
)
def test_other_text_is_refused(entry):
    with refused(f"a.b = {entry!r}", "expected entries as in `EXAMPLE`"):
        read_changes("a.b", entry, "EXAMPLE", increments=True)


def test_increments_and_the_first_step_are_refused():
    with refused("5 by 1 from step 9", "EXAMPLE"):
        read_changes("a.b", "5 by 1 from step 9", "EXAMPLE")
    with refused("5 from step 1", "expected step 2 or later"):
        read_changes("a.b", "5 from step 1", "EXAMPLE")
