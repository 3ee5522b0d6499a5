"""Scaling laws against what their papers print, and against each other."""

import math
from pathlib import Path

import pytest

from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan.scaling import (
    LAWS,
    TABLE_3,
    TABLE_A3,
    scaling_laws,
    scaling_lines,
)

GOPHER = 5.76e23
PAGE = Path(__file__).parents[3] / "docs/plan.md"


def optima(**numbers):
    return {one.law.name: one for one in scaling_laws(**numbers).optima}


def test_the_compute_of_gopher():
    """20 N, and approach 3 with the constants that the paper prints."""
    found = optima(flops=GOPHER)
    rule = found["20 tokens per parameter"]
    assert rule.parameters == pytest.approx(math.sqrt(GOPHER / 120))
    assert rule.parameters == pytest.approx(69.28e9, rel=1e-4)
    assert rule.tokens == pytest.approx(1.386e12, rel=1e-3)
    third = found["Chinchilla, approach 3"]
    assert third.parameters == pytest.approx(32.2e9, rel=2e-3)
    assert third.tokens == pytest.approx(2.98e12, rel=2e-3)
    assert found["Chinchilla, approach 1"].parameters == pytest.approx(67e9)
    # The paper's own figure for approach 3 is 40B; the refit agrees with approach 1 and 2
    assert found["approach 3, all digits"].parameters == pytest.approx(40.3e9, rel=2e-3)
    assert found["approach 3, fitted again"].parameters == pytest.approx(72.2e9, rel=2e-3)
    assert found["Kaplan et al."].parameters == pytest.approx(1.3e9 * (GOPHER / 8.64e19) ** 0.73)


def test_a_range_is_given_not_a_number():
    low, high = scaling_laws(flops=GOPHER).spread()
    assert low.law.name == "Chinchilla, approach 3"
    assert high.law.name == "approach 3, fitted again"
    low, high = scaling_laws(parameters=7e9).spread()
    assert low.tokens == pytest.approx(140e9)
    assert high.tokens > 3 * low.tokens


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e16, 1.2e19, 3e22, 5.76e23, 1e29])
def test_flops_parameters_and_tokens_lead_to_each_other(law, flops):
    one = optima(flops=flops)[law.name]
    assert 6 * one.parameters * one.tokens == pytest.approx(flops)
    for numbers in ({"parameters": one.parameters}, {"tokens": one.tokens}):
        other = optima(**numbers)[law.name]
        assert other.flops == pytest.approx(flops)


def test_approaches_1_and_2_are_their_tables():
    """Their printed tokens are C / 6N, up to rounding to three digits."""
    tokens = {
        "Chinchilla, approach 1": (TABLE_3, (8.0e9, 20.2e9, 205.1e9, 1.5e12, 3.7e12, 5.9e12)),
        "Chinchilla, approach 2": (TABLE_A3, (7.7e9, 20.0e9, 219.5e9, 1.7e12, 4.3e12, 7.1e12)),
    }
    for name, (flops, printed) in tokens.items():
        for compute, expected in zip(flops, printed, strict=False):
            assert optima(flops=compute)[name].tokens == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("law", [law for law in LAWS if law.loss_law], ids=lambda law: law.name)
def test_the_best_size_of_a_loss_has_the_lowest_loss(law):
    loss = law.loss_law
    flops = 1e21
    best = loss.best_parameters(flops)
    losses = {
        factor: loss.loss(best * factor, flops / 6 / (best * factor)) for factor in (0.8, 1.0, 1.25)
    }
    assert min(losses, key=losses.__getitem__) == 1.0
    one = optima(flops=flops)[law.name]
    assert one.parameters == pytest.approx(best)
    assert one.loss == pytest.approx(losses[1.0])
    assert one.extrapolated == 1.0


def test_over_training_and_loss_of_a_run():
    scaling = scaling_laws(parameters=8e9, tokens=15e12)
    assert scaling.flops == 6 * 8e9 * 15e12
    assert scaling.over_training == pytest.approx(93.75)
    losses = {one.law.name: one.loss for one in scaling.predictions}
    expected = 1.69 + 406.4 / 8e9**0.34 + 410.7 / 15e12**0.28
    assert losses["Chinchilla, approach 3"] == pytest.approx(expected)
    assert len(losses) == 3
    # More tokens than are best cost loss, for the same FLOPs
    best = optima(flops=scaling.flops)["Chinchilla, approach 3"].loss
    assert best < losses["Chinchilla, approach 3"]


def test_two_of_the_three_numbers_are_enough():
    run = scaling_laws(parameters=7e9, tokens=2e12)
    assert run.flops == pytest.approx(8.40e22)
    assert scaling_laws(flops=run.flops, parameters=7e9).tokens == pytest.approx(2e12)
    assert scaling_laws(flops=run.flops, tokens=2e12).parameters == pytest.approx(7e9)
    assert scaling_laws(parameters=7e9).over_training is None
    assert scaling_laws(tokens=140e9).flops is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({}, "of none: expected one or two"),
        ({"flops": 1e20, "tokens": 1e9, "parameters": 1e9}, "flops, parameters, tokens: expected"),
        ({"flops": 0.0}, "flops = 0.0: expected a number above 0"),
        ({"tokens": math.inf}, "tokens = inf"),
        ({"parameters": math.nan}, "parameters = nan"),
    ],
)
def test_other_input_is_refused(numbers, message):
    with pytest.raises(ConfigError, match=message):
        scaling_laws(**numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        {"flops": GOPHER},
        {"flops": 1e17},
        {"parameters": 8.03e9, "tokens": 15e12},
        {"parameters": 7e9},
        {"tokens": 2e12},
    ],
)
def test_lines_fit_and_say_where_they_extrapolate(numbers):
    lines = scaling_lines(scaling_laws(**numbers))
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert all(f"  {law.name} " in text for law in LAWS)
    assert "EXTRAPOLATED" in text
    assert "6.0e18 to 3.0e21 FLOPs" in text
    assert ("predicted loss" in text) == (len(numbers) == 2)


def test_far_outside_of_the_runs_no_loss_is_shown():
    """A run of a debug model: 6 x 1M x 10M = 6e13 FLOPs, 100,000 times below the smallest run."""
    lines = scaling_lines(scaling_laws(parameters=1e6, tokens=1e7))
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "  no predicted loss: the run is 100K times outside the runs of the laws" in lines
    assert "predicted loss: 1" not in text
    rows = [line for line in lines if "approach 3" in line]
    assert len(rows) == 3
    assert all(row.endswith(" n/a") for row in rows)


def test_within_the_runs_of_a_law_nothing_is_extrapolated():
    lines = scaling_lines(scaling_laws(flops=1e20))
    assert "EXTRAPOLATED" not in "\n".join(lines)
    for outside in (3e22, 6e17):
        rule = optima(flops=outside)["20 tokens per parameter"]
        assert rule.extrapolated == pytest.approx(10)


def test_the_page_shows_what_is_printed():
    shown = "\n".join(scaling_lines(scaling_laws(flops=GOPHER)))
    assert f"```\n{shown}\n```" in PAGE.read_text()
