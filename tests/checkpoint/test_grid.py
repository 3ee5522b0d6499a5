"""Grids: how a tensor is cut, and which lists of parts are no grid."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from titanlite.checkpoint.grid import Box, Grid, grid_of


def random_grid(chance: random.Random) -> Grid:
    """A grid of 0 to 4 dimensions with up to 4 cells in each."""
    lengths = [chance.randint(1, 9) for _ in range(chance.randint(0, 4))]
    edges = [
        sorted({0, n, *(chance.randrange(n) for _ in range(chance.randint(0, 3)))}) for n in lengths
    ]
    count = 1
    for line in edges:
        count *= len(line) - 1
    return Grid(tuple(map(tuple, edges)), tuple(f"file {number}" for number in range(count)))


def test_a_grid_is_found_from_its_boxes_in_any_order():
    chance = random.Random(0)
    for _ in range(300):
        grid = random_grid(chance)
        boxes = [
            *grid.boxes(),
            *(
                Box("empty", box.offsets, (0,) * len(box.sizes))
                for box in grid.boxes()
                if box.sizes
            ),
        ]
        chance.shuffle(boxes)
        assert grid_of(grid.shape, boxes) == grid


@pytest.mark.parametrize(
    "change",
    [
        lambda boxes: boxes[1:],
        lambda boxes: [*boxes, boxes[0]],
        lambda boxes: [*boxes[1:], boxes[1]],
        lambda boxes: [boxes[0]._replace(sizes=(1, 4)), *boxes[1:]],
        lambda boxes: [boxes[0]._replace(offsets=(-1, 0)), *boxes[1:]],
        lambda boxes: [*boxes[:-1], boxes[-1]._replace(offsets=(9, 9))],
        lambda boxes: [box._replace(offsets=(*box.offsets, 0)) for box in boxes],
        lambda boxes: [],
    ],
)
def test_parts_that_do_not_make_up_the_shape_are_refused(change):
    boxes = [Box("f", offsets, (2, 3)) for offsets in itertools.product((0, 2, 4), (0, 3))]
    assert grid_of((6, 6), boxes).edges == ((0, 2, 4, 6), (0, 3, 6))
    with pytest.raises(ValueError, match="part"):
        grid_of((6, 6), change(boxes))


def test_a_tensor_of_no_dimensions_has_one_cell_and_an_empty_one_none():
    assert grid_of((), [Box("f", (), ())]) == Grid((), ("f",))
    assert list(Grid((), ("f",)).boxes()) == [Box("f", (), ())]
    assert grid_of((0, 4), [Box("f", (0, 0), (0, 4))]) == Grid(((0,), (0, 4)), ())


@pytest.mark.slow
def test_offsets_whose_hashes_collide_cost_nothing():
    """20,000 of them in a dict take a minute: each is compared with all others."""
    # Constants of CPython's hash of tuples
    modulus, first, second = 2**64, 11400714785074694791, 14029467366897019727
    offsets, target = [], 12345
    for row in range(200_000):
        if len(offsets) == 20_000:
            break
        at = (2870177450012600261 + row * second) % modulus
        at = (at << 31 | at >> 33) % modulus * first % modulus
        if (column := (target - at) * pow(second, -1, modulus) % modulus) < 2**61 - 1:
            offsets.append((row, column))
    assert len(offsets) == 20_000
    assert len({hash(offset) for offset in offsets}) == 1
    started = time.process_time()
    with pytest.raises(ValueError, match="20000 parts"):
        grid_of((2**61, 2**61), [Box("", offset, (1, 1)) for offset in offsets])
    assert time.process_time() - started < 5
