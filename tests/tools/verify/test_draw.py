"""Layouts that `titanlite verify --draw` draws: which ones, and (slow) that they equal one
process.
"""

from __future__ import annotations

import pytest

from titanlite.config.load import all_keys
from titanlite.tools.cli.verify_command import run as verify
from titanlite.tools.verify.draw import CHOICES, NEEDS, draw_layouts
from titanlite.tools.verify.ladder import make_case, parse_layout


def drawn(count: int, seed: int, processes: int = 4, *arguments: str) -> list[str]:
    return draw_layouts(count, seed, processes, ["debug", *arguments], "cpu", "aot_eager", 4112)


def test_a_seed_draws_the_same_layouts_again():
    first = drawn(8, 1)
    assert first == drawn(8, 1)
    assert len(set(first)) == 8
    assert not set(first) & set(drawn(8, 2))
    assert drawn(4, 1) == first[:4]


def test_they_fit():
    assert all(make_case(["debug"], text, "cpu").processes <= 2 for text in drawn(10, 0, 2))
    # Nothing divides a model of one head but dp and pp
    assert not any("tp=" in text for text in drawn(10, 0, 4, "--model.num_heads=1"))
    assert drawn(3, 0, 4, "--training.seq_len=0") == []


def test_each_setting_is_there_where_it_has_an_effect():
    layouts = [dict(parse_layout(text)) for text in drawn(900, 3)]
    for key, values in CHOICES.items():
        full = key if "." in key else f"parallel.{key}"
        assert full in all_keys()
        found = {options[full] for options in layouts if full in options}
        assert found == set(values), key
    for key, needed in NEEDS.items():
        names = [name if "." in name else f"parallel.{name}" for name in (key, needed)]
        assert all(names[1] in options for options in layouts if names[0] in options)


@pytest.mark.slow
def test_drawn_layouts_equal_one_process():
    """`titanlite verify debug --draw 200` has more of them; docs/parallelism.md has its figures."""
    assert verify(["debug", "--draw", "12", "--draw-seed", "7"]) == 0
