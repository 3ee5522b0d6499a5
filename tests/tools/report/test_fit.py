"""The trend of curves with known parameters, and what departs from it."""

from __future__ import annotations

import numpy as np
import pytest
from report_runs import EXPONENT, FLOOR, NOISE, SCALE, losses

from titanlite.tools.report.fit import FEWEST, fit_power_law, trend

STEPS = np.arange(10, 10_001, 10)


def test_without_noise_the_parameters_are_found():
    law = fit_power_law(STEPS, FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT)
    assert law.exponent == pytest.approx(EXPONENT, rel=0.02)
    assert law.floor == pytest.approx(FLOOR, rel=0.02)
    assert law.scale == pytest.approx(SCALE, rel=0.05)
    assert law.noise < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_they_are_within_their_ranges(seed):
    law = fit_power_law(STEPS, losses(STEPS, seed))
    assert law.exponents[0] <= EXPONENT <= law.exponents[1]
    assert law.floors[0] <= FLOOR <= law.floors[1]
    assert law.noise == pytest.approx(NOISE, rel=0.15)
    np.testing.assert_allclose(law(STEPS), losses(STEPS, seed) - (losses(STEPS, seed) - law(STEPS)))
    assert (
        np.abs(law(STEPS[20:]) - (FLOOR + SCALE * STEPS[20:].astype(float) ** -EXPONENT)).max()
        < NOISE
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_curve_that_only_falls_has_no_spike_and_no_plateau(seed):
    found = trend(STEPS, losses(STEPS, seed), 100)
    assert found.judged
    assert found.spikes == []
    assert found.plateaus == []


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_neither_has_one_with_little_noise(noise):
    rest = np.random.default_rng(0).normal(0, noise, len(STEPS)) if noise else 0
    found = trend(STEPS, FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT + rest, 100)
    assert found.spikes == []
    assert found.plateaus == []


@pytest.mark.parametrize("seed", range(5))
def test_neither_has_one_of_the_shape_of_a_short_run(seed):
    """A steep fall, then a cosine of the learning rate: no power law."""
    s = np.arange(1, 301)
    values = (
        2
        + 6.3 * np.exp(-s / 30)
        + 0.6 * np.cos(np.pi * s / 600)
        + np.random.default_rng(seed).normal(0, 0.05, 300)
    )
    found = trend(s, values, 30)
    assert found.spikes == []
    assert found.plateaus == []


@pytest.mark.parametrize("place", [300, 500, 990])
@pytest.mark.parametrize("width", [1, 4])
def test_a_spike_is_found_where_it_is(place, width):
    values = losses(STEPS)
    values[place : place + width] += np.linspace(1.0, 0.6, width)
    (spike,) = trend(STEPS, values, 100).spikes
    assert spike.peak == spike.first == STEPS[place]
    assert spike.last == STEPS[place + width - 1]
    assert spike.value == values[place]
    assert 1.0 / NOISE / 2 < spike.z < 2 * 1.0 / NOISE


def test_two_spikes_are_two():
    values = losses(STEPS)
    values[[400, 600]] += 1
    assert [spike.peak for spike in trend(STEPS, values, 100).spikes] == [STEPS[400], STEPS[600]]


def test_a_value_that_is_low_is_no_spike():
    values = losses(STEPS)
    values[400] -= 1
    assert trend(STEPS, values, 100).spikes == []


def test_a_spike_does_not_bend_the_fit():
    values = losses(STEPS)
    clean = fit_power_law(STEPS, values)
    values[500:520] += 20
    assert fit_power_law(STEPS, values)(STEPS)[-1] == pytest.approx(clean(STEPS)[-1], abs=NOISE / 2)


def test_a_plateau_is_found_where_the_loss_stops_falling():
    true = FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT
    values = (losses(STEPS) - true) / 3 + np.where(STEPS < 4000, true, true[STEPS == 4000])
    (plateau,) = trend(STEPS, values, 100).plateaus
    assert 3500 <= plateau.first <= 5000
    assert plateau.last >= 9500
    assert abs(plateau.fall) < 3 * plateau.error
    assert plateau.expected > 6 * plateau.error


def test_a_plateau_that_noise_could_hide_is_none():
    true = FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT
    flat = np.where(STEPS < 4000, true, true[STEPS == 4000])
    values = flat + np.random.default_rng(0).normal(0, 30 * NOISE, len(STEPS))
    found = trend(STEPS, values, 100)
    assert (found.plateaus, found.judged) == ([], False)


@pytest.mark.parametrize("count", [0, 1, 5, FEWEST - 1])
def test_few_points_decide_nothing(count):
    steps = np.arange(200, 200 + count)
    found = trend(steps, losses(steps), 100)
    assert found.law is None
    assert found.spikes == found.plateaus == []
    assert found.why


@pytest.mark.parametrize(
    "values", [np.zeros(100), np.full(100, 5.0), np.linspace(1, 9, 100), np.full(100, -2.0)]
)
def test_curves_of_another_kind_are_no_error(values):
    found = trend(np.arange(1, 101), values, 0)
    assert found.law is not None
    assert np.isfinite(found.law(np.arange(1, 101))).all()
    assert found.spikes == []
