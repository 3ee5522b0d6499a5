"""Degrees: the nearest numbers that fit, and which layouts use FSDP."""

from __future__ import annotations

from titanlite.config.schema import ParallelConfig
from titanlite.rules.degrees import nearest, needs_fsdp


def test_nearest_lists_three_in_order():
    assert nearest(10, lambda n: n % 4 == 0, 100) == "4 or 8 or 12"
    assert nearest(3, lambda n: n > 50, 10) == ""


def test_one_process_uses_fsdp_only_if_a_key_asks_for_it():
    assert not needs_fsdp(ParallelConfig(), 1)
    assert needs_fsdp(ParallelConfig(), 2)
    assert needs_fsdp(ParallelConfig(cpu_offload=True), 1)
    assert needs_fsdp(ParallelConfig(reshard_after_forward="never"), 1)
