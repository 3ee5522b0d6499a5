"""Layouts: the nearest numbers that fit."""

from __future__ import annotations

from titanlite.rules.degrees import nearest


def test_nearest_lists_three_in_order():
    assert nearest(10, lambda n: n % 4 == 0, 100) == "4 or 8 or 12"
    assert nearest(3, lambda n: n > 50, 10) == ""
