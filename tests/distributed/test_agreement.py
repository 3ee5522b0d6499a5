"""Agreement: every rank gets values and errors of all, by messages that several threads send."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fuzz_samples import Reader, given

from titanlite.distributed import agreement
from titanlite.distributed.agreement import (
    PATIENT,
    TRAINING,
    Channel,
    StorageError,
    broadcast,
    broadcast_from_rank0,
    gather,
    gather_on_rank0,
    on_all_ranks,
    read_message,
    require_agreement,
)
from titanlite.distributed.process_group import join
from titanlite.runtime.errors import ConfigError


def gather_different_lengths() -> list:
    rank = dist.get_rank()
    return gather({"rank": rank, "text": "é" * 1000 * rank, "none": None, "list": [rank] * rank})


def test_values_of_any_length_reach_all_ranks(pool):
    expected = [
        {"rank": r, "text": "é" * 1000 * r, "none": None, "list": [r] * r} for r in range(3)
    ]
    assert pool.run(3, gather_different_lengths) == [expected] * 3
    assert gather({"a": 1}) == [{"a": 1}]  # without a process group


class Special(ConfigError):
    pass


def fail_on_two_ranks() -> list[str]:
    """How it ends on this rank: without an error, with problems of two ranks, and with errors of
    several kinds.
    """
    rank = dist.get_rank()
    assert on_all_ranks(lambda: rank) == rank

    def work(*errors: Exception | None) -> None:
        if error := errors[rank]:
            raise error

    cases = [
        (ConfigError(["the same", "rank 0"]), None, ConfigError(["the same", "rank 2"])),
        (Special("own"), None, None),
        (Special("own"), None, ConfigError("other")),
        (None, OSError("unexpected"), Special("own")),
    ]
    ends = []
    for errors in cases:
        try:
            on_all_ranks(functools.partial(work, *errors), expected=Special)
        except Exception as error:
            ends.append(f"{type(error).__name__}: {' | '.join(str(error).splitlines())}")
    return ends


def test_an_error_of_one_rank_is_raised_on_all(pool):
    first, second, third = pool.run(3, fail_on_two_ranks)
    common = ["ConfigError: the same | rank 0 | rank 2", "Special: own", "ConfigError: other"]
    assert first == third == [*common, "RuntimeError: rank 1: OSError: unexpected"]
    assert second == [*common, "OSError: unexpected"]


def ask_rank0() -> list:
    rank = dist.get_rank()

    def refuse() -> None:
        raise ConfigError("no such folder")

    with pytest.raises(ConfigError, match="no such folder"):
        broadcast_from_rank0(refuse)
    return broadcast_from_rank0(lambda: [rank, "found"])


def test_what_rank_0_finds_reaches_all(pool):
    assert pool.run(2, ask_rank0) == [[0, "found"]] * 2


def disagree() -> list[str]:
    rank = dist.get_rank()
    require_agreement(data="same")
    with pytest.raises(ConfigError) as caught:
        require_agreement(data=f"hash {rank // 2}", config="same")
    return caught.value.problems


def test_a_fact_that_differs_is_named_on_all(pool):
    for problems in pool.run(3, disagree):
        assert [problem.split(" differs")[0] for problem in problems] == ["rank 2: data"]


def fail_on_rank_0(number: int) -> str:
    def find() -> None:
        raise OSError(number, os.strerror(number), "/run/config.toml")

    try:
        broadcast_from_rank0(find)
    except (ConfigError, StorageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EISDIR, "ConfigError"), (errno.EACCES, "ConfigError"), (errno.ENOSPC, "StorageError")],
)
def test_a_file_that_fails_on_rank_0_is_an_error_of_all(pool, number, kind):
    """A full disk may have room at a restart; a path that is wrong stays wrong."""
    assert (
        pool.run(2, fail_on_rank_0, number)
        == [f"{kind}: /run/config.toml: {os.strerror(number)}"] * 2
    )


FUZZED = {
    "message": Reader(
        "text",
        given(b'[null, [], ""]', b'["no such folder"]'),
        lambda folder, data: read_message(data),
    ),
}


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
    """Rank 1 answers after a second and a half; the group waits one.

    None if rank 0 does not wait for it.
    """
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    join(torch.device("cpu"), 1, rank, 2, dist.FileStore(str(store), 2))
    if rank == 1:
        time.sleep(1.5)
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
