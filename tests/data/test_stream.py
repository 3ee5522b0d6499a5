"""The stream: a permutation per epoch, the same samples however many processes share them."""

from __future__ import annotations

import numpy as np
import pytest
from messages import refused

from titanlite.data.stream import IGNORED, TrainStream, Windows, count_targets, permute, validation_batches


class Row:
    """Token ids 0, 1, 2, ... in place of shards."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int):
        assert start >= 0
        assert start + count <= self.length
        return np.arange(start, start + count)


def stream(rank: int = 0, world: int = 1, local: int = 2, accumulation: int = 2, length: int = 1001, seed: int = 0):
    windows = Windows(Row(length), 10, "training")
    return TrainStream(windows, seed=seed, local_batch_size=local, accumulation=accumulation, rank=rank, world=world)


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


def test_labels_are_the_next_tokens():
    tokens, labels = stream().next_step()[0]
    assert tokens.shape == labels.shape == (2, 10)
    assert (labels == tokens + 1).all()
    assert (tokens[:, 0] % 10 == 0).all()


def starts(stream_, steps: int) -> list[list[int]]:
    """The first token of every sample, by step."""
    return [[int(row[0]) for batch in stream_.next_step() for row in batch.tokens] for _ in range(steps)]


def test_every_window_once_per_epoch_in_another_order():
    order = sum(starts(stream(), 50), [])  # 50 steps of 4 samples are two epochs of 100 windows
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(0, 1000, 10))
    assert order[:100] != order[100:]
    assert sum(starts(stream(seed=1), 25), []) != order[:100]


@pytest.mark.parametrize(("world", "local", "accumulation"), [(1, 1, 8), (1, 8, 1), (2, 2, 2), (4, 2, 1), (8, 1, 1)])
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
    assert one.epochs == 1.4


def test_validation_covers_the_windows_once_and_pads_with_rows_without_targets():
    windows = Windows(Row(231), 10, "validation")  # 23 windows
    for world, batch_size in ((1, 5), (2, 4), (3, 3), (4, 8)):
        shares = [list(validation_batches(windows, 0, batch_size, rank, world)) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        batches = sum(shares, [])
        assert {batch.tokens.shape for batch in batches} == {(batch_size, 10)}
        seen = [int(t[0]) for b in batches for t, y in zip(b.tokens, b.labels, strict=True) if (y != IGNORED).any()]
        assert sorted(seen) == list(range(0, 230, 10))
        assert int(count_targets(batches)) == 230
    assert int(count_targets(list(validation_batches(windows, 7, 4, 0, 1)))) == 70


def test_too_little_text_is_named():
    with refused("training text", "10 tokens", "up to 9"):
        Windows(Row(10), 10, "training")
