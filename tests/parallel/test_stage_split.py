"""The cut of the layers into stages, and which process has which."""

from __future__ import annotations

import itertools
import random

import pytest
from model_builder import EVEN

from titanlite.model.flavors import FLAVORS
from titanlite.parallel.stage_split import (
    balanced_split,
    most_received,
    stage_indices,
    stage_modules,
)


def stage_weights(weights: list[int], starts: list[int]) -> list[int]:
    return [
        sum(weights[begin:end])
        for begin, end in zip(starts, [*starts[1:], len(weights)], strict=True)
    ]


def test_no_other_cut_has_a_lighter_heaviest_stage():
    """Against every cut there is, for random weights."""
    generator = random.Random(0)
    for _ in range(60):
        blocks, stages = generator.randint(1, 8), generator.randint(1, 5)
        if stages > blocks:
            continue
        weights = [
            generator.randint(0, 9),
            *[generator.randint(1, 9)] * blocks,
            generator.randint(0, 20),
        ]
        starts = balanced_split(weights, stages)
        assert len(starts) == stages
        assert starts[0] == 0
        bounds = [*starts[1:], len(weights) - 1]
        assert all(
            b > max(a, 1) or (a == 0 and b > 1) for a, b in itertools.pairwise([0, *bounds])
        ), "a block each"
        cuts = itertools.combinations(range(2, blocks + 1), stages - 1)
        best = min(max(stage_weights(weights, [0, *cut])) for cut in cuts)
        assert max(stage_weights(weights, starts)) == best


@pytest.mark.parametrize(
    ("flavor", "stages", "expected"),
    [  # blocks per stage: the ends of the smaller models weigh as several blocks
        ("llama3_8b", 4, [8, 9, 9, 6]),
        ("llama3_70b", 4, [20, 20, 21, 19]),
        ("llama3_405b", 16, [7, *[8] * 14, 7]),
    ],
)
def test_ends_weigh_in_the_cut_of_the_flavors(flavor, stages, expected):
    modules = stage_modules(FLAVORS[flavor], stages, [])
    assert [
        len([name for name in names if name.startswith("layers")]) for names in modules
    ] == expected
    assert [name for names in modules for name in names][:2] == ["tok_embeddings", "layers.0"]
    assert modules[-1][-2:] == ["norm", "output"]


def test_the_explicit_cut_is_what_it_says():
    modules = stage_modules(EVEN, 3, ["layers.1", "norm"])
    assert modules == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3"],
        ["norm", "output"],
    ]


def test_stages_go_round_or_in_a_v():
    assert [stage_indices(rank, 4, 1, "1F1B") for rank in range(4)] == [[0], [1], [2], [3]]
    assert [stage_indices(rank, 2, 3, "Interleaved1F1B") for rank in range(2)] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    assert [stage_indices(rank, 2, 2, "ZBVZeroBubble") for rank in range(2)] == [[0, 3], [1, 2]]
    assert [stage_indices(rank, 2, 2, "DualPipeV") for rank in range(2)] == [[0, 3], [1, 2]]


def test_what_is_held_does_not_grow_with_the_microbatches():
    """For the schedules that begin backwards early; the first stage receives no input, the last no
    gradient.
    """
    for schedule, per_rank in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        last = 4 * per_rank - 1
        for index in range(last + 1):
            few, many = (most_received(index, 4, per_rank, schedule, n) for n in (16, 4096))
            assert few == many
            assert (few[0] == 0, few[1] == 0) == (index == 0, index == last)
    assert most_received(1, 4, 1, "GPipe", 64) == (64, 2)
