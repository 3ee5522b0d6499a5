"""Which rows a rank stores, where two axes cut them; test_explain.py compares with real tensors."""

from __future__ import annotations

import pytest

from titanlite.tools.explain.holdings import holdings
from titanlite.tools.explain.step import Stored

ONE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
STRIDED = ((0, 2), (0, 1))  # FSDP cuts what tp has cut


@pytest.mark.parametrize(
    ("degrees", "shape", "cuts", "rows"),
    [
        ({"dp_shard": 2, "tp": 2}, (32, 8), STRIDED, [(0, 7), (16, 23), (8, 15), (24, 31)]),
        ({"dp_shard": 2, "tp": 2}, (32, 8), ((0, 1), (1, 1)), [(0, 15), (0, 15), (16, 31), (16, 31)]),
        ({"dp_shard": 4}, (5,), ((0, 1), (-1, 1)), [(0, 1), (2, 3), (4, 4), (5, -1)]),
        ({"dp_shard": 2, "cp": 2}, (8,), ((0, 1), (-1, 1)), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"dp_replicate": 2, "dp_shard": 2}, (4,), ((0, 1), (-1, 1)), [(0, 1), (2, 3)] * 2),
    ],
)  # fmt: skip
def test_rows(degrees, shape, cuts, rows):
    degrees = {**ONE, **degrees}
    sizes = (degrees["dp_shard"] * degrees["cp"], degrees["tp"])
    stored = Stored("wq", shape, ("dp_shard_cp", "tp"), sizes, cuts, "")
    (parameter,) = holdings({0: [stored]}, degrees)
    assert [parameter.holdings[rank].rows for rank in range(4)] == rows


def test_rows_of_experts():
    """Eight experts over ep 2, then over the two ranks that hold the same four."""
    axes = ("expert_shard", "ep", "tp")
    cuts = ((0, 2), (0, 1), (-1, 1))
    stored = Stored("experts.w1", (8, 48, 32), axes, (2, 2, 1), cuts, "")
    (parameter,) = holdings({0: [stored]}, ONE | {"dp_shard": 2, "cp": 2})
    rows = [parameter.holdings[rank].rows for rank in range(4)]
    assert rows == [(0, 1), (4, 5), (2, 3), (6, 7)]
