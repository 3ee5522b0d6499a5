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
    config = ScheduleConfig(**{"warmup_steps": 10, "min_ratio": 0.1, **section})
    return [lr_factor(config, step, total) for step in range(total + 50)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_warms_up_from_its_first_step_and_never_climbs_again(name):
    rates = factors(name=name)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    last = 1.0 if name == "constant" else 0.1
    assert rates[99:] == pytest.approx([last] * 51)


def test_shapes_of_the_decay():
    assert factors(name="linear")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors(name="cosine")[31] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90)))
    wsd = factors(name="wsd", decay_fraction=0.2)
    assert wsd[10:80] == [1.0] * 70
    assert wsd[89] == pytest.approx(0.1 + 0.9 * 0.5)


def test_extremes_of_the_schedule():
    assert factors(warmup_steps=0)[0] == pytest.approx(1.0, abs=1e-3)
    assert factors(total=5, warmup_steps=10)[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert factors(total=1, warmup_steps=0)[0] == pytest.approx(0.1)


def test_schedule_sets_the_rate_of_a_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0)
    config = ScheduleConfig(warmup_steps=4, name="linear", min_ratio=0.0)
    schedule = Schedule(optimizer, config, 2.0, 10)
    for step, lr in ((1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (10, 0.0), (2, 1.0)):
        assert schedule.set_lr(step) == optimizer.param_groups[0]["lr"] == lr
