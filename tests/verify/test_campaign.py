"""The whole ladder, and products of three axes on eight processes. Minutes: marked slow."""

from __future__ import annotations

import pytest

from titanlite.cli.verify import run as verify

pytestmark = pytest.mark.slow


def test_the_whole_ladder_of_four_processes():
    assert verify(["debug"]) == 0


def test_eight_processes():
    layouts = ["dp_shard=2,tp=2,pp=2", "dp_shard=2,cp=2,tp=2", "dp_replicate=2,dp_shard=2,tp=2", "cp=2,pp=2,tp=2"]
    assert verify(["debug", *(word for layout in layouts for word in ("--layout", layout))]) == 0
