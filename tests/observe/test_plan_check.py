"""The line that compares a run with its plan: once, on rank 0, after a minute."""

from __future__ import annotations

import logging

import pytest

from titanlite.config.load import load_config
from titanlite.model.flavors import FLAVORS
from titanlite.observe import plan_check
from titanlite.observe.plan_check import PlanCheck

HOUR = {"tps": 5000.0, "memory_gib": 60.0, "seconds": 3600.0}


@pytest.fixture
def build(monkeypatch, caplog):
    """A function from the name of a device and a rank to a `PlanCheck`."""
    caplog.set_level(logging.INFO, logger="titanlite")

    def check(device: str, rank: int = 0) -> PlanCheck:
        monkeypatch.setattr(plan_check, "device_name", lambda device_: device)
        monkeypatch.setattr(plan_check.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(plan_check.dist, "get_world_size", lambda: 8)
        config = load_config(["llama3_8b", "--training.global_batch_size=8"])
        return PlanCheck(config, FLAVORS["llama3_8b"], None)

    return check


def test_prediction_and_measurement_are_compared_once(build, caplog):
    check = build("NVIDIA H100 80GB HBM3")
    for seconds in (10.0, 69.0, 71.0, 3600.0):
        check.compare(HOUR | {"seconds": seconds})
    (record,) = caplog.records
    assert record.event == "plan"
    assert "measured 60.0 GiB and 5,000 (" in record.message


@pytest.mark.parametrize(("device", "rank"), [("CPU", 0), ("NVIDIA H100 80GB HBM3", 1)])
def test_nothing_is_said_on_an_unknown_device_and_on_other_ranks(build, caplog, device, rank):
    check = build(device, rank)
    check.compare(HOUR | {"seconds": 0.0})
    check.compare(HOUR)
    assert not caplog.records
