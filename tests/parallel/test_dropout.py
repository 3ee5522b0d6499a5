"""The masks of dropout: how many numbers are dropped, and that no mask is that of another."""

from __future__ import annotations

import itertools

import pytest
import torch

from titanlite.data.order import dropout_keys
from titanlite.parallel.dropout import dropped, scramble

WORD = 1 << 32
SALT = torch.tensor(0xC0FFEE11)


def scrambled(x: int) -> int:
    """The same in Python's integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * factor % WORD
    return x ^ (x >> 15)


def is_dropped(key: int, salt: int, feature: int, p: float) -> bool:
    a = scrambled(scrambled(key % WORD) ^ salt)
    c = scrambled(a ^ (key >> 32))
    return ((a >> 1) * scrambled(feature) + c) % WORD < p * WORD


def test_no_number_overflows():
    """The largest ones too."""
    edges = [0, 1, 2, 0xFFFF, 0x10000, WORD // 2, WORD - 2, WORD - 1]
    assert scramble(torch.tensor(edges)).tolist() == [scrambled(x) for x in edges]
    keys = torch.tensor([[high * WORD + low for high in (0, 7, WORD // 2 - 1) for low in edges]])
    for salt in edges:
        found = dropped(keys, torch.tensor(salt), 1000, 9, 0.5)
        expected = [
            [is_dropped(key, salt, k, 0.5) for k in range(1000, 1009)] for key in keys[0].tolist()
        ]
        assert found.tolist() == [expected]


def test_no_two_numbers_are_scrambled_to_one():
    numbers = torch.cat([torch.arange(50_000) + start for start in (0, WORD // 2, WORD - 50_000)])
    found = scramble(numbers)
    assert len(found.unique()) == len(numbers)
    assert found.min() >= 0
    assert found.max() < WORD


def standardised(mask: torch.Tensor, p: float) -> torch.Tensor:
    """Numbers with mean 0 and variance 1."""
    return (mask.double() - p) / (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_numbers(p):
    """All numbers, each token's and each feature's are dropped as by independent draws."""
    numbers = standardised(dropped(dropout_keys(1, range(16), 256), SALT, 0, 512, p), p)
    numbers = numbers.flatten(0, 1)  # (4096 tokens, 512 features)
    rows, columns = numbers.shape
    assert abs(numbers.sum()) / (rows * columns) ** 0.5 < 4
    for sums in (numbers.sum(1) / columns**0.5, numbers.sum(0) / rows**0.5):
        assert abs(sums.var() - 1) < 5 * (2 / len(sums)) ** 0.5
        assert sums.abs().max() < 5.5


def test_features_and_tokens_are_independent():
    """Correlations of all pairs, and three neighbours at a time."""
    mask = dropped(dropout_keys(2, range(8), 128), SALT, 0, 1024, 0.1).flatten(0, 1)
    numbers = standardised(mask, 0.1)  # (1024, 1024)
    for products in (numbers.T @ numbers, numbers @ numbers.T):
        off_diagonal = products[~torch.eye(1024, dtype=torch.bool)] / 32
        assert abs(off_diagonal.std() - 1) < 0.01
        assert off_diagonal.abs().max() < 8
    three = (mask[:, :-2] & mask[:, 1:-1] & mask[:, 2:]).double().mean()
    assert abs(three - 0.001) < 2e-4


def test_another_sample_seed_place_or_adapter_has_another_mask():
    seq_len = 64
    samples = (0, 1, 2, 1000, 1_000_000_007)
    masks = []
    for seed, sample in itertools.product((0, 1, 2**63 - 1), samples):
        for salt in (0, 1, 2, WORD - 1, int(SALT)):
            keys = dropout_keys(seed, [sample], seq_len)
            masks.append(dropped(keys, torch.tensor(salt), 0, 256, 0.1)[0])
    tokens = standardised(torch.stack(masks).flatten(0, 1), 0.1)  # (3 x 5 x 5 x 64, 256)
    products = tokens @ tokens.T / 16
    products.fill_diagonal_(0)
    assert products.abs().max() < 10.5  # equal rows: 16
    whole = tokens.unflatten(0, (-1, seq_len)).flatten(1)
    correlations = whole @ whole.T / whole.shape[1] ** 0.5
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 5


def test_a_part_of_the_features_has_its_part_of_the_mask():
    keys = dropout_keys(3, [5, 6], 10)
    whole = dropped(keys, SALT, 0, 48, 0.3)
    parts = [dropped(keys, SALT, first, 16, 0.3) for first in (0, 16, 32)]
    assert torch.equal(torch.cat(parts, dim=-1), whole)
    assert torch.equal(dropped(keys[1:, 3:7], SALT, 0, 48, 0.3), whole[1:, 3:7])
