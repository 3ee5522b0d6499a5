"""The process group: devices and backends by name, a process alone, and one seed for all ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from messages import refused

from titanlite.distributed.process_group import backend, device_type, start


@pytest.mark.parametrize(
    ("name", "available", "expected"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_auto_is_cuda_where_there_is_one(monkeypatch, name, available, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert device_type(name) == expected


def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("run.device = cuda", "no CUDA device", "auto", "cpu"):
        device_type("cuda")


def test_nccl_comes_with_gloo_for_cpu_memory():
    assert backend("cuda") == "cpu:gloo,cuda:nccl"
    assert backend("cpu") == "gloo"


def start_alone() -> tuple[int, int, str, str]:
    """As a process that nothing launched; the pool's group is left first."""
    dist.destroy_process_group()
    device = start("cpu", 30, 5)
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), device.type


def test_a_process_alone_is_a_world_of_one(pool):
    assert pool.run(1, start_alone) == [(0, 1, "gloo", "cpu")]


def random_numbers(seed: int) -> tuple[float, float]:
    start("cpu", 30, seed)
    return random.random(), float(torch.rand(()))


def test_every_rank_gets_the_same_seed(pool):
    one, other = pool.run(2, random_numbers, 5)
    assert one == other
    assert pool.run(1, random_numbers, 6) != [one]
