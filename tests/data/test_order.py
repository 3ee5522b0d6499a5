"""The order of the samples: a permutation for each key (`test_stream.py` has the samples)."""

from __future__ import annotations

import numpy as np
import pytest

from titanlite.data.order import permute


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
