"""The stream: order of samples, windows of a text, the same on any number of processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from messages import refused
from text_in_memory import Documents, Ranks, only_source

from titanlite.config.schema import TrainingConfig
from titanlite.data.excluded import merge_ranges
from titanlite.data.order import permute
from titanlite.data.rows import IGNORED, Windows, count_targets, read_batch, validation_rows
from titanlite.data.stream import TrainStream, validation_batches


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 4096])
def test_permute_is_a_permutation(size):
    for key in (0, 1, 2**63 + 5):
        assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_mixes_and_depends_on_the_key():
    a, b = ([permute(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 20
    steps = np.diff(a)
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.1
    assert len(set(steps.tolist())) > 500


def test_too_little_text_is_named():
    with refused("training text of web", "10 tokens", "up to 9"):
        Windows(Documents([10]), 10, "training text of web")
    with refused("validation text", "10 tokens", "up to 9", "validation.freq = 0"):
        Windows(Documents([10]), 10, "validation text")


def test_positions_restart_at_documents_and_rows_and_no_target_is_of_another_document():
    rows = Windows(Documents([7] * 15), 10, "training text")
    batch = read_batch([(rows, 0), (rows, 1), (rows, 6), None], 10, document_mask=True)
    begins = [{0, 7}, {0, 4}, {0, 3}, {0}]  # of the rows, which are at 0, 10 and 60 of the text
    ignored = [{6}, {3}, {2, 9}, set(range(10))]
    for labels, positions, begin, no_target in zip(
        batch.labels, batch.positions, begins, ignored, strict=True
    ):
        assert {i for i, position in enumerate(positions.tolist()) if position == 0} == begin
        assert all(b in (0, a + 1) for a, b in itertools.pairwise(positions.tolist()))
        assert {i for i, label in enumerate(labels.tolist()) if label == IGNORED} == no_target


def test_a_token_that_may_not_be_a_target_is_no_label():
    rows = Windows(Documents([50], masked=[0, 3, 20, 21]), 10, "training text")
    labels = read_batch([(rows, 0), (rows, 1), (rows, 2)], 10, document_mask=False).labels
    assert [(row == IGNORED).nonzero().flatten().tolist() for row in labels] == [[2], [9], [0]]


def windows(length: int, what: str = "training text") -> Windows:
    return Windows(Documents([length]), 10, what)


def stream(
    rank: int = 0,
    world: int = 1,
    local: int = 2,
    accumulation: int = 2,
    length: int = 1001,
    seed: int = 0,
):
    training = TrainingConfig(
        seq_len=10, local_batch_size=local, global_batch_size=local * accumulation * world
    )
    return TrainStream(
        only_source(windows(length), seed), training, Ranks(rank, world), document_mask=False
    )


def test_labels_are_the_next_tokens():
    tokens, labels, *others = stream().next_step()[0]
    assert tokens.shape == labels.shape == (2, 10)
    assert (labels == tokens + 1).all()
    assert (tokens[:, 0] % 10 == 0).all()
    assert others == [None] * 3


def keys_of(world: int, local: int, steps: int, seed: int = 0, excluded: int = 0) -> torch.Tensor:
    """The keys of all samples of these steps, in the order of the stream: (samples, 10)."""
    training = TrainingConfig(seq_len=10, local_batch_size=local, global_batch_size=8)
    order = only_source(windows(1001), seed).without([(5, 5 + excluded)])
    streams = [TrainStream(order, training, Ranks(r, world), False, True) for r in range(world)]
    rows = []
    for _ in range(steps):
        batches = [one.next_step() for one in streams]
        rows += [b.dropout_keys for turn in zip(*batches, strict=True) for b in turn]
        assert all(len(b.dropout_keys) == len(b.tokens) for of_rank in batches for b in of_rank)
    return torch.cat(rows)


def test_the_keys_of_dropout_are_a_function_of_seed_sample_and_place():
    """In any layout, in each epoch others, and also after samples were excluded."""
    keys = keys_of(world=1, local=8, steps=30)  # 240 samples, of 100 rows
    assert len(keys.unique()) == keys.numel()
    assert keys.min() >= 0
    assert keys.max() > 2**62
    for world, local in ((2, 2), (4, 1)):
        assert torch.equal(keys_of(world, local, steps=30), keys)
    assert not torch.isin(keys_of(1, 8, steps=30, seed=1), keys).any()
    without = keys_of(1, 8, steps=2, excluded=3)
    assert torch.equal(without, torch.cat([keys[:5], keys[8:19]]))


def test_validation_has_no_keys_of_dropout():
    one = stream()
    one.dropout = True
    assert one.next_step()[0].dropout_keys is not None
    assert all(b.dropout_keys is None for b in validation_batches(windows(231), 0, one))


def starts(stream_, steps: int) -> list[list[int]]:
    """The first token of every sample, by step."""
    return [
        [int(row[0]) for batch in stream_.next_step() for row in batch.tokens] for _ in range(steps)
    ]


def test_every_window_once_per_epoch_in_another_order():
    order = sum(starts(stream(), 50), [])  # 50 steps of 4 samples are two epochs of 100 windows
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(0, 1000, 10))
    assert order[:100] != order[100:]
    assert sum(starts(stream(seed=1), 25), []) != order[:100]


@pytest.mark.parametrize(
    ("world", "local", "accumulation"), [(1, 1, 8), (1, 8, 1), (2, 2, 2), (4, 2, 1), (8, 1, 1)]
)
def test_a_step_has_the_same_samples_on_any_number_of_processes(world, local, accumulation):
    expected = starts(stream(local=8, accumulation=1), 30)
    shares = [starts(stream(rank, world, local, accumulation), 30) for rank in range(world)]
    for step in range(30):
        assert sorted(sum((share[step] for share in shares), [])) == sorted(expected[step])


def test_state_is_the_number_of_samples():
    one = stream()
    starts(one, 30)
    state = one.state_dict()
    assert int(state["samples"]) == 120
    other = stream(rank=1, world=2, local=2, accumulation=1)
    other.load_state_dict(state)
    assert starts(other, 5) == [row[2:] for row in starts(one, 5)]
    assert one.epochs == {"": 1.4}
    assert one.seconds > 0
    one.load_state_dict(one.state_dict())
    assert one.seconds == 0  # in a rollback: the abandoned steps are not logged


def test_validation_covers_the_windows_once_and_pads_with_rows_without_targets():
    held_out = windows(231)  # 23 of them
    for world, batch_size in ((1, 5), (2, 4), (3, 3), (4, 8)):
        streams = [stream(rank, world, batch_size) for rank in range(world)]
        shares = [list(validation_batches(held_out, 0, like)) for like in streams]
        assert len({len(share) for share in shares}) == 1
        batches = sum(shares, [])
        assert {batch.tokens.shape for batch in batches} == {(batch_size, 10)}
        seen = [
            int(t[0])
            for b in batches
            for t, y in zip(b.tokens, b.labels, strict=True)
            if (y != IGNORED).any()
        ]
        assert sorted(seen) == list(range(0, 230, 10))
        assert int(count_targets(batches)) == 230
    assert int(count_targets(list(validation_batches(held_out, 7, stream(local=4))))) == 70


def test_a_short_validation_text_is_a_row_with_padding():
    for lengths, targets in (([3, 4], 5), ([10], 9), ([11], 10)):
        rows = validation_rows(Documents(lengths), 10, "validation text")
        (batch,) = validation_batches(rows, 0, stream(local=1))
        assert int(count_targets([batch])) == targets
    with refused("validation text", "1 tokens", "validation.freq = 0"):
        validation_rows(Documents([1]), 10, "validation text")


class Sums:
    """Rows that are made while training: any object with `count` and `fill`."""

    count = 1000

    def fill(self, index, ids, ignored, document_mask):
        ids[:] = 1000 * index + np.arange(len(ids))
        return np.empty(0, np.int64)


def test_rows_that_are_no_text():
    order = only_source(Sums(), 5)
    training = TrainingConfig(seq_len=8, global_batch_size=4)
    batch = TrainStream(order, training, Ranks(), document_mask=True).next_step()[0]
    assert batch.tokens[:, 0].tolist() == [1000 * order.pick(i)[1] for i in range(4)]
    assert (batch.labels == batch.tokens + 1).all()
    assert (batch.positions == torch.arange(8)).all()


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
