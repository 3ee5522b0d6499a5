"""Spikes where they were put and nowhere else, and the means of the last two parts."""

from __future__ import annotations

import numpy as np
import pytest
from report_runs import EXPONENT, FLOOR, NOISE, SCALE, losses

from titanlite.tools.report.loss_curve import FEWEST, WINDOW, find_spikes, improvement

STEPS = np.arange(10, 10_001, 10)


@pytest.mark.parametrize("seed", range(10))
def test_a_curve_that_only_falls_has_no_spike(seed):
    assert find_spikes(STEPS, losses(STEPS, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_it_has_none_with_little_noise(noise):
    rest = np.random.default_rng(0).normal(0, noise, len(STEPS))
    assert find_spikes(STEPS, FLOOR + SCALE * STEPS.astype(float) ** -EXPONENT + rest) == []


@pytest.mark.parametrize("seed", range(5))
def test_it_has_none_with_the_shape_of_a_short_run(seed):
    """A steep fall, then a cosine of the learning rate."""
    s = np.arange(1, 301)
    values = (
        2
        + 6.3 * np.exp(-s / 30)
        + 0.6 * np.cos(np.pi * s / 600)
        + np.random.default_rng(seed).normal(0, 0.05, 300)
    )
    assert find_spikes(s, values) == []


@pytest.mark.parametrize("place", [200, 300, 500, 990])
@pytest.mark.parametrize("width", [1, 4])
def test_a_spike_is_found_where_it_is(place, width):
    values = losses(STEPS)
    values[place : place + width] += np.linspace(1.0, 0.6, width)
    (spike,) = find_spikes(STEPS, values)
    assert spike.peak == spike.first == STEPS[place]
    assert spike.last == STEPS[place + width - 1]
    assert spike.value == values[place]
    assert 1.0 / NOISE / 2 < spike.z < 2 * 1.0 / NOISE


def test_two_spikes_are_two():
    values = losses(STEPS)
    values[[400, 402, 600]] += 1
    peaks = [spike.peak for spike in find_spikes(STEPS, values)]
    assert peaks == [STEPS[400], STEPS[402], STEPS[600]]


def test_a_new_level_is_one_spike_until_half_of_the_window_has_it():
    values = losses(STEPS)
    values[500:] += 1
    (spike,) = find_spikes(STEPS, values)
    assert spike.first == STEPS[500]
    assert STEPS[500 + WINDOW // 2 - 4] <= spike.last <= STEPS[500 + WINDOW // 2 + 4]


def test_a_value_that_is_low_is_no_spike():
    values = losses(STEPS)
    values[400] -= 1
    assert find_spikes(STEPS, values) == []


def test_windows_in_several_chunks_are_those_of_one():
    steps = np.arange(1, 200_001)
    values = 2 + np.random.default_rng(0).uniform(0, NOISE, len(steps))
    places = [65_536, 65_536 + WINDOW, 131_071 + WINDOW, 199_999]
    values[places] += 1
    assert [spike.peak - 1 for spike in find_spikes(steps, values)] == places


@pytest.mark.parametrize("count", [0, 1, FEWEST, WINDOW])
def test_few_losses_have_no_spike(count):
    assert find_spikes(np.arange(count), np.arange(count, dtype=float) ** 9) == []


@pytest.mark.parametrize(
    "values", [np.zeros(100), np.full(100, 5.0), np.linspace(1, 9, 100), np.full(100, -2.0)]
)
def test_curves_of_another_kind_have_none(values):
    assert find_spikes(np.arange(1, 101), values) == []


def test_the_last_tenth_is_compared_with_the_tenth_before():
    steps = np.arange(10, 1001, 10)
    values = np.full(100, 3.0)
    values[80:90] = [2.4, 2.6] * 5
    values[90:] = [2.1, 2.3] * 5
    found = improvement(steps, values)
    assert (found.before.first, found.before.last, found.before.count) == (810, 900, 10)
    assert (found.last.first, found.last.last, found.last.count) == (910, 1000, 10)
    assert (found.before.value, found.last.value) == (pytest.approx(2.5), pytest.approx(2.2))
    assert found.fall == pytest.approx(0.3)
    each = np.std([2.4, 2.6] * 5, ddof=1) / 10**0.5
    assert found.error == pytest.approx(2**0.5 * each)


def test_the_error_of_the_fall_is_that_of_many_runs():
    """The falls of 300 runs without a trend scatter by the error that each of them names."""
    steps = np.arange(1, 1001)
    noise = np.random.default_rng(0)
    found = [improvement(steps, noise.normal(3, 0.1, 1000)) for _ in range(300)]
    scatter = np.std([one.fall for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(scatter, rel=0.15)


def test_too_few_losses_are_not_compared():
    few = np.arange(2 * FEWEST - 1)
    assert improvement(few, few.astype(float)) is None
    enough = np.arange(2 * FEWEST)
    assert improvement(enough, enough.astype(float)).fall == -FEWEST
