"""Fewer points, in which the extremes remain."""

from __future__ import annotations

import numpy as np

from titanlite.tools.report.thin import extremes, means, numbers


def test_a_spike_of_one_point_in_a_million_remains():
    x = np.arange(1_000_000)
    y = np.sin(x / 1e5)
    y[777_777], y[123_456] = 9.0, -9.0
    few_x, few_y = extremes(x, y, 500)
    assert len(few_x) <= 500
    assert few_y.max() == 9.0
    assert few_y.min() == -9.0
    assert few_x[0] == 0
    assert few_x[-1] == 999_999
    assert (np.diff(few_x) > 0).all()


def test_few_points_stay_as_they_are():
    x, y = np.arange(10), np.arange(10.0)
    assert extremes(x, y, 10)[0] is x
    assert means(x, y, 10)[1] is y


def test_means_keep_the_mean():
    x, y = np.arange(1000), np.random.default_rng(0).normal(size=1000)
    mx, my = means(x, y, 100)
    assert len(mx) == 100
    np.testing.assert_allclose(my.mean(), y.mean())


def test_numbers_have_the_digits_of_a_plot():
    assert numbers(np.array([1 / 3, 2.0, 1234567.8, 0.0, 1e-9])) == [0.33333, 2, 1234600, 0, 1e-9]
    assert all(type(value) is int for value in numbers(np.array([3.0, 1e6])))
