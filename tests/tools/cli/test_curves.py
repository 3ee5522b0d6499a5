"""Curves in the terminal and as SVG, of functions with known values."""

from __future__ import annotations

import pytest

from titanlite.tools.cli.curves import (
    Curve,
    Mark,
    Picture,
    sampled,
    short,
    svg_picture,
    text_picture,
)


def picture(value, steps: int) -> Picture:
    return Picture(
        "t",
        steps,
        lambda step: 10 * step,
        (Curve("y", "{:.1f}", value),),
        (Mark("end", steps, (value(steps),)),),
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (999_960, "1M"),
        (12_345, "12.35k"),
        (4e9, "4B"),
        (15e12, "15T"),
    ],
)
def test_short_numbers(number, text):
    assert short(number) == text


def test_sampled_steps_go_from_the_first_to_the_last():
    for steps in (1, 2, 67, 68, 10**18):
        found = sampled(steps, 68)
        assert (found[0], found[-1], len(found)) == (1, steps, 68)
        assert found == sorted(found)


@pytest.mark.parametrize("blocks", [True, False])
def test_columns_are_filled_up_to_the_value(blocks):
    """A straight line up: the number of filled eighths of a column is its value, rounded."""
    text = text_picture(picture(lambda step: step, 68), blocks)
    rows = [line[12:].ljust(68) for line in text.splitlines() if line[11:12] == "|"]
    assert len(rows) == 12
    for column in range(68):
        cells = [row[column] for row in rows]
        if blocks:
            assert sum(" ▁▂▃▄▅▆▇█".index(cell) for cell in cells) == round(96 * (column + 1) / 68)
        else:
            assert cells.count("#") == pytest.approx(12 * (column + 1) / 68, abs=0.6)


@pytest.mark.parametrize(
    ("value", "steps"),
    [(lambda step: 0.0, 5), (lambda step: 3.0, 1), (lambda step: step / 10**11, 10**11)],
)
def test_extremes_can_be_drawn(value, steps):
    drawn = picture(value, steps)
    assert max(map(len, text_picture(drawn).splitlines())) <= 80
    assert "nan" not in svg_picture(drawn)
