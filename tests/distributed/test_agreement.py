"""Agreement between ranks: every rank gets the values, and the errors, of all."""

from __future__ import annotations

import errno
import functools
import os

import pytest
import torch.distributed as dist
from fuzz_samples import Reader, given

from titanlite.distributed.agreement import (
    StorageError,
    broadcast_from_rank0,
    gather,
    on_all_ranks,
    read_message,
    require_agreement,
)
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
