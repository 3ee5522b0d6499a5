"""The process group: devices and backends by name, a process alone, and one seed for all ranks."""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from messages import refused

from titanlite.config.schema import CommConfig, DebugConfig, RunConfig
from titanlite.distributed import process_group, rendezvous
from titanlite.distributed.process_group import start, use_loopback
from titanlite.distributed.rendezvous import interface_towards
from titanlite.runtime import device as runtime_device
from titanlite.runtime.errors import LISTENER, JoinError

ROOT = Path(__file__).parents[2]


def start_on(device: str, seed: int = 5) -> torch.device:
    return start(RunConfig(device=device, seed=seed), CommConfig(timeout_seconds=20), DebugConfig())


@pytest.fixture
def gpus(monkeypatch):
    """A machine with CUDA devices, as far as the process group asks. Returns the recorded calls."""
    calls = {"groups": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.update(device=device))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: calls.update(options, backend=backend),
    )
    monkeypatch.setattr(dist, "new_group", lambda **options: calls["groups"].append(options))
    monkeypatch.setattr(
        process_group, "set_group_timeout", lambda group, seconds: calls.update(patience=seconds)
    )
    monkeypatch.setattr(process_group, "_host_group", None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # remembered, and restored at the end
        monkeypatch.delenv(name)
    return calls


def test_each_process_of_a_node_has_a_gpu_and_nccl_connects_at_once(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(runtime_device, "segments_can_grow", lambda: True)
    device = start_on("auto")
    assert device == gpus["device"] == gpus["device_id"] == torch.device("cuda", 3)
    assert gpus["backend"] == "nccl"
    assert gpus["groups"] == [{"backend": "gloo", "timeout": timedelta(seconds=30)}] * 2
    assert gpus["patience"] == 24 * 3600
    assert gpus["timeout"] == timedelta(seconds=30)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("soft", "hard", "expected"), [(1024, 4096, 4096), (256, resource.RLIM_INFINITY, 10_240)]
)
def test_the_limit_of_descriptors_is_raised(gpus, monkeypatch, soft, hard, expected):
    """macOS has an unlimited hard limit, and refuses an unlimited soft limit."""
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: raised.append((what, *limits)))
    start_on("auto")
    assert raised == [(resource.RLIMIT_NOFILE, expected, hard)]


def start_alone() -> tuple[int, int, str, str]:
    """As a process that nothing launched; the pool's group is left first."""
    dist.destroy_process_group()
    device = start_on("cpu")
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), device.type


def test_a_process_alone_is_a_world_of_one(pool):
    assert pool.run(1, start_alone) == [(0, 1, "gloo", "cpu")]


def random_numbers(seed: int) -> tuple[float, float]:
    start_on("cpu", seed)
    return random.random(), float(torch.rand(()))


def test_every_rank_gets_the_same_seed(pool):
    one, other = pool.run(2, random_numbers, 5)
    assert one == other
    assert pool.run(1, random_numbers, 6) != [one]


def start_with_a_world_size() -> int:
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "8"
    start_on("cpu")
    return dist.get_world_size()


def test_a_world_size_without_a_rank_is_not_ours(pool):
    """Some schedulers set it for all processes."""
    assert pool.run(1, start_with_a_world_size, timeout=30) == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interface_is_the_one_towards_an_address():
    assert interface_towards("127.0.0.1").startswith("lo")
    assert interface_towards("no-such-host.invalid") == ""


def meet(rank: int, world_size: int) -> str:
    """As a process of several: rank 0 with the launcher's socket, the others with its address.

    The value of a key.
    """
    launcher = socket.create_server(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.getsockname()[1])}
    if rank == 0:
        os.environ[LISTENER] = str(os.dup(launcher.fileno()))
    launcher.close()
    rendezvous.JOIN = timedelta(seconds=1)
    store = rendezvous.meet(rank, world_size)
    store.set("key", "value")
    return store.get("key").decode()


def test_rank_0_serves_the_store_at_the_launchers_socket(pool):
    assert pool.run(1, meet, 0, 1) == ["value"]


def meet_nobody(rank: int) -> None:
    with refused("did not find each other at 127.0.0.1:", error=JoinError):
        meet(rank, 2)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nodes_that_are_missing_are_one_error(pool, rank):
    pool.run(1, meet_nobody, rank)


def test_an_interface_that_the_user_has_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == socket.if_nameindex()[0][1]
