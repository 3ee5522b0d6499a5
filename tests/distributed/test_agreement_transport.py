"""Transport of agreement: values and bits of all ranks reach all, by messages that several threads
can send at the same time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed import agreement
from titanlite.distributed.agreement import (
    PATIENT,
    TRAINING,
    Channel,
    broadcast,
    gather,
    gather_on_rank0,
)
from titanlite.distributed.process_group import join


def broadcast_to_all() -> list:
    return [broadcast([dist.get_rank(), "é" * 5000]), broadcast(None), gather(dist.get_rank())]


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_a_tree_of_any_size_reaches_all_ranks(pool, size):
    assert pool.run(size, broadcast_to_all) == [[[0, "é" * 5000], None, list(range(size))]] * size


def exchange_in_two_threads() -> bool:
    """Two threads gather different values at the same time, and the main thread all-reduces
    numbers.
    """
    rank, size, found = dist.get_rank(), dist.get_world_size(), []

    def exchange(name: str, channel: Channel) -> None:
        found.extend(
            gather([name, i, rank], channel) == [[name, i, r] for r in range(size)]
            for i in range(50)
        )

    channels = {"training": TRAINING, "saving": PATIENT}
    threads = [threading.Thread(target=exchange, args=item) for item in channels.items()]
    for thread in threads:
        thread.start()
    for i in range(50):
        number = torch.tensor(i)
        dist.all_reduce(number)
        found.append(int(number) == i * size)
    for thread in threads:
        thread.join()
    return len(found) == 150 and all(found)


def test_threads_with_different_channels_share_a_group(pool):
    assert pool.run(3, exchange_in_two_threads) == [True] * 3


def or_bits(many: int) -> tuple[int, int, int]:
    """The bits of all ranks, of the last one, and of none; the ranks send to each other as from
    `many` ranks on.
    """
    agreement.MANY = many
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return tuple(agreement.bitwise_or(bits) for bits in (1 << rank, 4 * (rank == last), 0))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("many", [0, 99])
def test_bits_of_all_ranks_reach_all(pool, size, many):
    assert pool.run(size, or_bits, many) == [(2**size - 1, 4, 0)] * size


def wait_longer_than_the_group(store: Path, channel: Channel) -> list | None:
    """Rank 1 answers two seconds later; the group waits one.

    None if rank 0 does not wait for it.
    """
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    join(torch.device("cpu"), 1, rank, 2, dist.FileStore(str(store), 2))
    if rank == 1:
        time.sleep(2)
    try:
        return gather_on_rank0(rank, channel)
    except RuntimeError:
        return None
    finally:
        dist.destroy_process_group()
        join(torch.device("cpu"), 60, rank, 2, dist.FileStore(f"{store}-last", 2))


def test_a_channel_waits_as_long_as_it_says(pool, tmp_path):
    assert pool.run(2, wait_longer_than_the_group, tmp_path / "1", PATIENT) == [[0, 1], []]
    assert pool.run(2, wait_longer_than_the_group, tmp_path / "2", TRAINING) == [None, None]
