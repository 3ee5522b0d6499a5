"""The stream without excluded samples: a pure function of its position, for any batch size."""

from __future__ import annotations

import pytest
from text_in_memory import Documents, Ranks, only_source

from titanlite.config.schema import TrainingConfig
from titanlite.data.excluded import merge_ranges
from titanlite.data.rows import Windows
from titanlite.data.stream import TrainStream

WHOLE = only_source(Windows(Documents([1001]), 10, "text"))


def numbers(ranges: list[tuple[int, int]], count: int) -> list[int]:
    order = WHOLE.without(ranges)
    return [order.number(position) for position in range(count)]


def test_positions_skip_the_ranges():
    assert numbers([], 5) == [0, 1, 2, 3, 4]
    assert numbers([(2, 4), (6, 7)], 6) == [0, 1, 4, 5, 7, 8]
    assert numbers([(6, 7), (2, 4), (3, 5)], 5) == [0, 1, 5, 7, 8]  # in any order, and overlapping
    assert numbers([(0, 3), (3, 6)], 3) == [6, 7, 8]
    assert WHOLE.without([(0, 3)]).number(1) == 4
    assert WHOLE.number(1) == 1


def test_ranges_are_merged_and_those_excluded_before_stay_so():
    assert merge_ranges([(6, 7), (2, 4), (3, 5), (2, 3)]) == [(2, 5), (6, 7)]
    assert WHOLE.without([(8, 12)]).without([(32, 40), (10, 16)]).excluded == [(8, 16), (32, 40)]
    assert WHOLE.excluded == []


def test_a_range_that_is_excluded_later_changes_no_position_before_it():
    """So the integer in a checkpoint means the same samples before and after a rollback."""
    first, both = numbers([(10, 14)], 20), numbers([(10, 14), (18, 22)], 20)
    assert first[14:16] == [18, 19]
    assert both[:14] == first[:14]
    assert both[14] == 22


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rest_is_read_in_order_by_any_number_of_processes(world):
    """A range within a step, and one over the border of two steps."""
    training = TrainingConfig(seq_len=10, local_batch_size=1, global_batch_size=4)
    read = []
    streams = [
        TrainStream(WHOLE, training, Ranks(rank, world), document_mask=False)
        for rank in range(world)
    ]
    for stream in streams:
        stream.exclude([(1, 3), (9, 12)])
    for _ in range(4):
        batches = [stream.next_step() for stream in streams]
        read += [
            int(batch.tokens[0, 0]) // 10 for row in zip(*batches, strict=True) for batch in row
        ]
    expected = [number for number in range(21) if number not in (1, 2, 9, 10, 11)]
    assert read == [WHOLE.pick(number)[1] for number in expected]
    assert (streams[0].begun, streams[0].samples) == (12, 16)
    assert streams[0].epochs == WHOLE.epochs(21)
