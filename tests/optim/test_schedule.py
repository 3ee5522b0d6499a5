"""Learning rate schedules against their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from titanlite.config.schema import ScheduleConfig
from titanlite.optim.schedule import Schedule, lr_factor


def factors(total: int = 100, **section) -> list[float]:
    """The factors of steps 1, 2, ..., total + 50."""
    config = ScheduleConfig(**{"warmup_steps": 10, "min_ratio": 0.1, **section})
    return [lr_factor(config, step, total) for step in range(1, total + 51)]


SHAPES = [
    {"name": "cosine"},
    {"name": "linear"},
    {"name": "wsd"},
    {"name": "wsd", "decay": "sqrt"},
    {"name": "wsd", "decay": "cosine", "decay_steps": 30, "decay_fraction": 0.0},
    {"name": "wsd", "decay_fraction": 1.0},
    {"name": "constant"},
    {"name": "inverse_sqrt"},
    {"name": "step", "milestones": "0.5 from step 40, 0.1 from step 90"},
]
ENDS = {"constant": 1.0, "inverse_sqrt": math.sqrt(10 / 100)}  # the others end with the floor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_every_schedule_warms_up_from_its_first_step_and_never_climbs_again(shape, floor):
    rates = factors(**shape, min_ratio=floor)
    assert rates[:10] == [(i + 1) / 10 for i in range(10)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    end = 0.1 if shape["name"] == "step" else floor
    assert rates[99] == ENDS.get(shape["name"], end)
    assert min(rates) >= floor
    if shape["name"] != "inverse_sqrt":
        assert set(rates[99:]) == {rates[99]}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("total", "warmup"), [(1, 0), (1, 1), (2, 0), (7, 0), (100, 1), (5, 10), (10, 10), (11, 10)]
)
def test_no_schedule_begins_with_0_or_divides_by_0(shape, total, warmup):
    rates = factors(total, **shape, warmup_steps=warmup, min_ratio=0.0)
    assert rates[0] == 1 / max(1, warmup)
    assert all(0 <= rate <= 1 for rate in rates)
    assert max(rates[:total]) == rates[min(total, max(1, warmup)) - 1]


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)  # steps down are not continuous
def test_no_schedule_jumps(shape):
    """With ten times as many steps, the changes from step to step are smaller: by sqrt(10) for a
    square root.
    """
    largest = []
    for total in (1000, 10_000):
        scaled = {**shape, "decay_steps": total // 3} if "decay_steps" in shape else shape
        rates = factors(total, **scaled, warmup_steps=total // 10)
        largest.append(max(abs(a - b) for a, b in itertools.pairwise(rates[:total])))
    assert 0 < largest[1] < largest[0] / 3


def test_shapes_of_the_decay():
    assert factors(name="linear")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[31] == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90))
    )
    wsd = factors(name="wsd", decay_fraction=0.2)
    assert wsd[10:80] == [1.0] * 70
    assert wsd[89] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="wsd", decay="sqrt", decay_fraction=0.2)[84] == pytest.approx(
        0.1 + 0.9 * 0.5
    )
    assert factors(name="wsd", decay="cosine", decay_steps=20)[84] == pytest.approx(
        0.1 + 0.45 * (1 + math.sqrt(0.5))
    )
    assert factors(name="wsd", decay_fraction=0.0)[9:100] == [1.0] * 91
    assert factors(name="wsd", decay_steps=500)[10:] == pytest.approx(factors(name="linear")[10:])
    rates = factors(name="inverse_sqrt")
    assert [rates[step - 1] for step in (10, 40, 90)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert factors(2000, name="inverse_sqrt")[-1] == 0.1  # the floor
    rates = factors(name="step", milestones="0.5 from step 40, 0.1 from step 90")
    assert [rates[step - 1] for step in (39, 40, 89, 90)] == [1.0, 0.5, 0.5, 0.1]


def test_extremes_of_the_schedule():
    assert factors(warmup_steps=0)[0] == 1.0
    assert factors(total=5, warmup_steps=10)[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert factors(total=1, warmup_steps=0)[:2] == [1.0, pytest.approx(0.1)]
    assert factors(total=2, warmup_steps=0)[1] == pytest.approx(0.1)


def test_schedule_sets_the_rate_of_a_step():
    group = {"params": [nn.Parameter(torch.zeros(1))], "peak_lr": 2.0}
    optimizer = torch.optim.SGD([group], lr=9.0)
    config = ScheduleConfig(warmup_steps=4, name="linear", min_ratio=0.0)
    schedule = Schedule(optimizer, config, 2.0, 10)
    for step, lr in ((1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (10, 0.0), (2, 1.0)):
        assert schedule.set_lr(step) == optimizer.param_groups[0]["lr"] == lr
