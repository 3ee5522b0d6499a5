"""Degrees: the nearest numbers that fit, and which layouts use FSDP."""

from __future__ import annotations

import re

import pytest

from titanlite.config.load import load_config
from titanlite.config.schema import ParallelConfig
from titanlite.model.flavors import resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.rules.degrees import nearest, needs_fsdp
from titanlite.runtime.errors import ConfigError


def test_nearest_lists_three_in_order():
    assert nearest(10, lambda n: n % 4 == 0, 100) == "4 or 8 or 12"
    assert nearest(3, lambda n: n > 50, 10) == ""


@pytest.mark.parametrize(
    ("world_size", "command", "processes"),
    [
        (1, "debug --parallel.tp=2", 2),
        (3, "debug --parallel.tp=2", 4),
        (1, "debug --parallel.pp=2 --parallel.cp=2 --parallel.dp_shard=1", 4),
        (1, "debug_moe --parallel.ep=2", 2),
        (2, "debug_moe --parallel.tp=2 --parallel.ep=4", 8),
    ],
)
def test_too_few_processes_for_a_layout_say_how_many_it_needs(world_size, command, processes):
    config = load_config([*command.split(), "--training.global_batch_size=16"])
    llama = resolve_flavor(config.model, 4112)
    with pytest.raises(ConfigError) as caught:
        check_layout(config, llama, world_size)
    assert re.findall(r"NGPU=(\d+) \./run_train\.sh", str(caught.value)) == [str(processes)]
    check_layout(config, llama, processes)


def test_one_process_uses_fsdp_only_if_a_key_asks_for_it():
    assert not needs_fsdp(ParallelConfig(), 1)
    assert needs_fsdp(ParallelConfig(), 2)
    assert needs_fsdp(ParallelConfig(cpu_offload=True), 1)
    assert needs_fsdp(ParallelConfig(reshard_after_forward="never"), 1)
