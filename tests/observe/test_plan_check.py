"""The line that compares a run with its plan: once, on rank 0, after a minute."""

from __future__ import annotations

import logging

import pytest

from titanlite.observe import plan_check
from titanlite.observe.plan_check import PlanCheck


@pytest.fixture
def build(monkeypatch, caplog):
    """A function from a rank and a line to a `PlanCheck` with that comparison."""
    caplog.set_level(logging.INFO, logger="titanlite")

    def check(rank: int, line: str) -> PlanCheck:
        monkeypatch.setattr(plan_check.dist, "get_rank", lambda: rank)
        return PlanCheck(lambda row: f"{line} {row['tps']}" if line else "")

    return check


def run(check: PlanCheck) -> None:
    for seconds in (10.0, 69.0, 71.0, 3600.0):
        check.compare({"tps": seconds, "seconds": seconds})


def test_a_run_is_compared_once_a_minute_after_its_first_row(build, caplog):
    run(build(0, "plan:"))
    (record,) = caplog.records
    assert record.event == "plan"
    assert record.message == "plan: 71.0"


@pytest.mark.parametrize(("rank", "line"), [(0, ""), (1, "plan:")])
def test_nothing_is_said_without_a_plan_and_on_other_ranks(build, caplog, rank, line):
    run(build(rank, line))
    assert not caplog.records
