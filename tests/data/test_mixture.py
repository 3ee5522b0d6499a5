"""The mixture: exact shares, phases, and the same global batches for any number of processes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time

import numpy as np
import pytest
import torch
from messages import refused
from text_in_memory import Documents, Ranks

from titanlite.config.schema import DataConfig, PhaseConfig, SourceConfig, TrainingConfig
from titanlite.data import mixture
from titanlite.data.mixture import PATTERN, Mixture, build_mixture, pattern_counts
from titanlite.data.order import Samples
from titanlite.data.packing import PackedRows
from titanlite.data.rows import Rows, Windows
from titanlite.data.stream import TrainStream

SEVEN = [0.67, 0.14, 0.045, 0.045, 0.025, 0.025, 0.02]  # their sum is 0.97


def sources_of(mixed: Mixture, start: int, end: int) -> list[int]:
    return [mixed.locate(sample)[0] for sample in range(start, end)]


@pytest.mark.parametrize("weights", [SEVEN, [1, 1, 1], [0, 5], [1e-5, 1], [3, 2, 2, 9, 1e-3]])
def test_shares_of_a_pattern_are_exact_to_one_sample(weights):
    counts = pattern_counts(weights)
    assert sum(counts) == PATTERN
    assert all(
        abs(count - PATTERN * w / sum(weights)) < 1
        for count, w in zip(counts, weights, strict=True)
    )
    assert (
        np.bincount(
            sources_of(Mixture([(0, weights)]), 0, PATTERN), minlength=len(weights)
        ).tolist()
        == counts
    )


def test_sources_are_spread_evenly():
    found = np.array(sources_of(Mixture([(0, SEVEN)]), 0, PATTERN))
    for source, weight in enumerate(SEVEN):
        used = np.cumsum(found == source)
        assert abs(used - np.arange(1, PATTERN + 1) * weight / sum(SEVEN)).max() < 2


def test_each_source_is_used_in_order_through_patterns_and_phases(monkeypatch):
    monkeypatch.setattr(mixture, "PATTERN", 100)
    mixed = Mixture([(0, [1, 2, 0]), (350, [0, 1, 1]), (360, [1, 0, 0]), (777, [1, 1, 1])])
    used = [0, 0, 0]
    for sample in range(1500):
        assert mixed.used(sample) == used
        source, number = mixed.locate(sample)
        assert number == used[source]
        used[source] += 1
    assert set(sources_of(mixed, 350, 360)) == {1, 2}
    assert set(sources_of(mixed, 360, 777)) == {0}


def test_any_sample_is_found_at_once():
    mixed = Mixture([(0, SEVEN), (10**9, SEVEN[::-1])])
    order = Samples({str(i): Windows(Documents([10_000 + i]), 10, "") for i in range(7)}, 1, mixed)
    order.pick(0)
    started = time.process_time()
    rows, index = order.pick(10**12)
    seconds = time.process_time() - started
    assert 0 <= index < rows.count
    assert seconds < 1e-3
    before, after = mixed.used(10**12), mixed.used(10**12 + 1)
    assert sum(before) == 10**12
    assert [b - a for a, b in zip(before, after, strict=True)].count(1) == 1


TRAINING = TrainingConfig(seq_len=16, global_batch_size=24, local_batch_size=1)


def section(*weights: float, phases: tuple[PhaseConfig, ...] = ()) -> DataConfig:
    named = (
        SourceConfig(name, name, weight) for name, weight in zip("abcd", weights, strict=False)
    )
    return DataConfig(sources=tuple(named), phases=phases)


def test_weights_are_divided_by_their_sum_which_is_logged(caplog):
    with caplog.at_level(logging.INFO, "titanlite"):
        mixed = build_mixture(section(0.67, 0.30), TRAINING)
    assert mixed.used(PATTERN) == pattern_counts([0.67, 0.30])
    assert "a 69.07%, b 30.93%" in caplog.text
    assert "sum to 0.97" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "titanlite"):
        build_mixture(section(0.7, 0.3), TRAINING)
    assert "sum" not in caplog.text


def test_one_source_is_a_mixture_that_takes_every_sample_of_it(caplog):
    with caplog.at_level(logging.INFO, "titanlite"):
        mixed = build_mixture(DataConfig(path="text"), TRAINING)
    assert not caplog.text
    for sample in (0, 1, PATTERN - 1, PATTERN, 3 * PATTERN + 7, 10**12):
        assert mixed.locate(sample) == (0, sample)
        assert mixed.used(sample) == [sample]


def test_a_weight_too_small_for_the_pattern_is_refused():
    with refused("data.sources: the weight of b, 1e-06", "at least 1e-05"):
        build_mixture(section(1, 1e-6), TRAINING)
    phases = (PhaseConfig(from_step=9, weights=(("a", 1e-6), ("b", 1.0))),)
    with refused("data.phases[1]: the weight of a, 1e-06"):
        build_mixture(section(1, 1, phases=phases), TRAINING)


def test_phases_begin_with_a_step_or_a_number_of_tokens():
    phases = (
        PhaseConfig(from_step=11, weights=(("b", 1.0), ("a", 0.0))),
        PhaseConfig(from_tokens=16 * 24 * 20, weights=(("a", 1.0), ("b", 0.0))),
    )
    mixed = build_mixture(section(1, 0, phases=phases), TRAINING)
    assert mixed.starts == [0, 10 * 24, 20 * 24]
    assert mixed.used(30 * 24) == [20 * 24, 10 * 24]


def four_sources() -> Samples:
    """Four sources, two of them packed, with different token ids and 100 to 1,500 rows, in three
    phases.
    """
    random, sources = np.random.default_rng(0), dict[str, Rows]()
    for number, name in enumerate("abcd"):
        lengths = random.integers(2, 70, 100 * 3**number // 4 + 60).tolist()
        text = Documents(
            lengths, first=number * 1_000_000, masked=list(range(0, 50, 7)) if name == "b" else None
        )
        sources[name] = PackedRows(text, 16, name) if name in "ad" else Windows(text, 16, name)
    weights = [0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0, 0, 0.5, 0.5]
    return Samples(sources, 7, Mixture(list(zip((0, 3000, 7001), weights, strict=True))))


def global_batches(order: Samples, world: int, start: int, steps: int) -> torch.Tensor:
    """(samples, 3, S): tokens, labels and positions of the batches of all ranks, in the order of
    the samples.
    """
    training = dataclasses.replace(
        TRAINING, local_batch_size={1: 6, 2: 12, 3: 4, 4: 3}.get(world, 1)
    )
    streams = [
        TrainStream(order, training, Ranks(rank, world), document_mask=True)
        for rank in range(world)
    ]
    found = []
    for stream in streams:
        stream.load_state_dict({"samples": torch.tensor(start * 24)})
    for _ in range(steps):
        shares = [stream.next_step() for stream in streams]
        found += [
            torch.stack(share[i][:3], dim=1) for i in range(len(shares[0])) for share in shares
        ]
    return torch.cat(found)


@pytest.mark.slow
def test_global_batches_are_the_same_for_any_number_of_processes():
    """Also stopped and resumed with other numbers: over 10,000 samples, which are several epochs of
    a source.
    """
    order, steps = four_sources(), 10_000 // 24 + 1
    expected = global_batches(order, 1, 0, steps)
    for world in (2, 3, 4, 6, 8):
        assert torch.equal(global_batches(order, world, 0, steps), expected)
    cuts = itertools.pairwise([0, 1, 120, 126, 280, 300, steps])
    parts = [
        global_batches(order, n, a, b - a)
        for n, (a, b) in zip((8, 3, 1, 6, 4, 2), cuts, strict=True)
    ]
    assert torch.equal(torch.cat(parts), expected)


def test_within_an_epoch_of_a_source_no_row_is_repeated_or_skipped():
    order = four_sources()
    picked: dict[str, list[int]] = {name: [] for name in order.names}
    for sample in range(10_000):
        rows, index = order.pick(sample)
        picked[order.names[order.rows.index(rows)]].append(index)
    for name, rows in zip(order.names, order.rows, strict=True):
        assert len(picked[name]) == round(order.epochs(10_000)[name] * rows.count)
        whole = len(picked[name]) // rows.count * rows.count
        for start in range(0, whole, rows.count):
            assert sorted(picked[name][start : start + rows.count]) == list(range(rows.count))
        assert len(set(picked[name][whole:])) == len(picked[name][whole:])
    epochs = order.epochs(10_000)
    assert max(epochs.values()) > 5
    assert min(epochs.values()) > 0.5
