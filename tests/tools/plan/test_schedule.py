"""The learning rate and the batch size at the steps where they change."""

from __future__ import annotations

import pytest

from titanlite.config.load import load_config
from titanlite.optim.schedule import lr_factor
from titanlite.tools.plan.schedule import MOST_CHANGES, schedule_lines, schedule_points

RUN = ["debug", "--training.steps=100", "--schedule.warmup_steps=10", "--optimizer.lr=1e-3"]


def points(*options: str):
    """Name -> (step, tokens, learning rate); the debug model has 8 sequences of 128 tokens."""
    found = schedule_points(load_config([*RUN, *options]))
    return {point.name: (point.step, point.tokens, pytest.approx(point.lr)) for point in found}


def test_the_points_of_a_stable_phase_and_its_decay():
    assert points("--schedule.name=wsd", "--schedule.decay_steps=20") == {
        "first step": (1, 1024, 1e-4),
        "peak, end of warmup": (10, 10_240, 1e-3),
        "end of stable phase": (80, 81_920, 1e-3),
        "middle of the decay": (90, 92_160, 5.5e-4),
        "last step": (100, 102_400, 1e-4),
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--schedule.name=constant"], {"last step": (100, 102_400, 1e-3)}),
        (["--schedule.name=inverse_sqrt"], {"last step": (100, 102_400, 1e-3 * 0.1**0.5)}),
        (
            [
                "--schedule.name=step",
                "--schedule.milestones=0.5 from step 51, 0.25 from step 76",
            ],
            {"last step": (100, 102_400, 2.5e-4)},
        ),
        (["--schedule.warmup_steps=200"], {"last step": (100, 102_400, 5e-4)}),
        (["--schedule.warmup_steps=0"], {"peak": (1, 1024, 1e-3)}),
        (["--training.steps=1", "--schedule.warmup_steps=0"], {"last step": (1, 1024, 1e-3)}),
        (["--schedule.warmup_steps=100"], {"last step": (100, 102_400, 1e-3)}),
        (["--schedule.name=cosine"], {"middle of the decay": (55, 56_320, 5.5e-4)}),
        (["--optimizer.lr=0"], {"last step": (100, 102_400, 0)}),
    ],
)
def test_other_shapes(options, expected):
    found = points(*options)
    assert {name: found.get(name) for name in expected} == expected


def test_each_milestone_is_a_point():
    config = load_config(
        [*RUN, "--schedule.name=step", "--schedule.milestones=0.5 from step 51, 0.25 from step 76"]
    )
    found = [(point.step, point.lr) for point in schedule_points(config)]
    assert (51, pytest.approx(5e-4)) in found
    assert (76, pytest.approx(2.5e-4)) in found


def test_each_rate_is_that_of_the_run():
    config = load_config([*RUN, "--schedule.name=wsd", "--schedule.decay=sqrt"])
    for point in schedule_points(config):
        assert point.lr == config.optimizer.lr * lr_factor(config.schedule, point.step, 100)


def test_the_batch_size_stands_where_it_changes():
    """10 steps of 8 and then 16 sequences of 128 tokens; 24 from the middle between 10,240 and
    200,000 tokens.
    """
    config = load_config(
        [*RUN, "--training.batch_ramp=16 from step 11, 32 by 8 from 200_000 tokens"]
    )
    found = schedule_points(config)
    sizes = [(point.step, point.sequences) for point in found if point.name == "batch size"]
    assert sizes == [(11, 16), (58, 24), (89, 32)]
    assert found[-1].tokens == 128 * (10 * 8 + 47 * 16 + 31 * 24 + 12 * 32)


def test_a_fine_ramp_has_its_first_and_last_size():
    config = load_config(
        [*RUN, "--training.local_batch_size=1", "--training.batch_ramp=32 by 1 from 100_000 tokens"]
    )
    sizes = [one.sequences for one in schedule_points(config) if one.name == "batch size"]
    assert MOST_CHANGES < 32 - 8
    assert sizes == [9, 32]


def test_lines_have_a_row_for_each_point_and_80_columns():
    found = schedule_points(load_config(["llama3_8b", "--schedule.name=wsd"]))
    lines = schedule_lines(found)
    assert len(lines) == 2 + len(found)
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[-4:] == ["1", "524K", f"{found[0].lr:.2e}", "64"]
