"""Agreement: all ranks exchange small values, so that all of them take the same branch.

What it is: `gather` gives every rank the values of all ranks, `broadcast` gives it rank 0's, and
the other functions decide from these. So all ranks reach the same decision: an error on one rank is
raised on all, and no rank waits for one that has exited. All ranks call each function together.
How it is made: values are sent as JSON, in messages with their own tag and time-out. A collective
takes its time-out from its group, but here preparing data may take a day, while a rank that hangs
in a step must be noticed after minutes. Object collectives, which pickle, would be safe too,
because the ranks of a run trust each other: torch.distributed.checkpoint uses them for small values
in a save and a load.
What it costs: two messages (length and content) from each rank to rank 0, and two to each rank
along a tree, of CPU tensors over gloo. Used while a run starts, loads and saves, never by the
training thread within a step. For `bitwise_or`, which is called after each step, see there.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.process_group import PATIENCE, host_group
from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError, StorageError, shortened

T = TypeVar("T")

# System errors caused by the path that the user has chosen
PATH_ERRORS = (
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENAMETOOLONG,
)
# From this number of ranks on, `bitwise_or` sends messages instead of calling all_reduce. Without
# network delays all_reduce is faster below 32 ranks, and equally fast at 32; with delays, messages
# are faster.
MANY = 32


class Channel(NamedTuple):
    """The tag of messages, and the time-out for each; 0: that of the process group.

    Only one thread of a process may use a channel at a time.
    """

    tag: int
    timeout: timedelta


# 0 is torch's default tag
TRAINING = Channel(1, timedelta(0))
PATIENT = Channel(2, PATIENCE)
BITS = Channel(3, timedelta(0))


def is_alone() -> bool:
    """Whether there are no other ranks."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def gather(value: object, channel: Channel = TRAINING) -> list[Any]:
    """Gathers the JSON value of every rank, in the order of ranks."""
    return list(broadcast(gather_on_rank0(value, channel), channel))


def gather_on_rank0(value: object, channel: Channel = TRAINING) -> list[Any]:
    """Gathers the JSON values of all ranks on rank 0, which receives them in turn; returns an empty
    list on the others.
    """
    if is_alone():
        return [value]
    if dist.get_rank() != 0:
        send(_encode(value), 0, channel)
        return []
    values: list[Any] = [value]
    for rank in range(1, dist.get_world_size()):
        values.append(_decode(receive(rank, channel)))
    return values


def broadcast(value: object, channel: Channel = TRAINING) -> Any:
    """Sends rank 0's JSON value to all along a tree: each round doubles the ranks that have it."""
    if is_alone():
        return value
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    content = _encode(None)
    if rank == 0:
        content = _encode(value)
    num_reached = 1
    while num_reached < world_size:
        if num_reached <= rank < 2 * num_reached:
            content = receive(rank - num_reached, channel)
        elif rank < num_reached and rank + num_reached < world_size:
            send(content, rank + num_reached, channel)
        num_reached *= 2
    return _decode(content)


def bitwise_or(bits: int) -> int:
    """Combines the bits of all ranks by or.

    gloo passes an all-reduce around the ring of ranks, twice: little work, but 2 (N - 1) messages
    one after another. From MANY ranks on, in round i each rank sends its bits to rank + 2^i (mod
    N): log2 N rounds (docs/multinode.md).
    """
    if is_alone():
        return bits
    combined = torch.tensor(bits)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if world_size < MANY:
        dist.all_reduce(combined, dist.ReduceOp.BOR, host_group())
        return int(combined)
    distance = 1
    while distance < world_size:
        received = torch.zeros_like(combined)
        # Start both: each rank sends to one rank and receives from another
        receiving = _receiving(received, (rank - distance) % world_size, BITS)
        _sending(combined, (rank + distance) % world_size, BITS).wait()
        receiving.wait()
        combined = combined | received
        distance *= 2
    return int(combined)


def _sending(content: Tensor, rank: int, channel: Channel) -> dist.Work:
    work = dist.isend(content, rank, host_group(), channel.tag)
    assert work is not None, "this rank is in the group"
    return work


def _receiving(memory: Tensor, rank: int, channel: Channel) -> dist.Work:
    work = dist.irecv(memory, rank, host_group(), channel.tag)
    assert work is not None, "this rank is in the group"
    return work


def send(content: Tensor, rank: int, channel: Channel) -> None:
    _sending(torch.tensor([len(content)]), rank, channel).wait(channel.timeout)
    _sending(content, rank, channel).wait(channel.timeout)


def receive(rank: int, channel: Channel) -> Tensor:
    length = torch.zeros(1, dtype=torch.int64)
    _receiving(length, rank, channel).wait(channel.timeout)
    content = torch.empty(int(length), dtype=torch.uint8)
    _receiving(content, rank, channel).wait(channel.timeout)
    return content


def _encode(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return read_message(content.numpy().tobytes())


def read_message(content: bytes) -> Any:
    """Parses the JSON value that another rank has sent. Raises ConfigError if it is not JSON.

    The network is trusted, but another version of titanlite or other software may answer at the
    address.
    """
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(
            f"a message between ranks is not JSON ({error}); check that all ranks run the same "
            "titanlite, and that nothing else uses MASTER_PORT"
        ) from None


# Outcomes on a rank, from best to worst, as `on_all_ranks` sends them
GOOD = 0
EXPECTED_ERROR = 1
CONFIG_ERROR = 2
OTHER_ERROR = 3


def on_all_ranks(
    work: Callable[[], T],
    channel: Channel = TRAINING,
    expected: type[ConfigError] = ConfigError,
) -> T:
    """Returns what `work` returns on this rank. If it raises on any rank, all ranks raise, with the
    problems of all.

    The exception is `expected` if all errors are of that type, ConfigError if all are ConfigErrors,
    otherwise the original error on the ranks where one was raised, and RuntimeError on the others.
    """
    outcome = GOOD
    problems: list[str] = []
    other_error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except ConfigError as error:
        problems = error.problems
        outcome = CONFIG_ERROR
        if isinstance(error, expected):
            outcome = EXPECTED_ERROR
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        problems = [f"rank {rank}: {type(error).__name__}: {shortened(str(error), 2000)}"]
        outcome = OTHER_ERROR
        other_error = error
    outcomes = gather((outcome, problems), channel)
    worst = max(outcome for outcome, _ in outcomes)
    if worst == GOOD:
        done: T = result
        return done
    if other_error is not None:
        raise other_error
    worst_problems: list[str] = []  # without repetitions
    for outcome, problems in outcomes:
        if outcome == worst:
            worst_problems += [text for text in problems if text not in worst_problems]
    if worst == OTHER_ERROR:
        raise RuntimeError("; ".join(worst_problems))
    if worst == CONFIG_ERROR:
        raise ConfigError(worst_problems)
    raise expected(worst_problems)


def broadcast_from_rank0(find: Callable[[], Any]) -> Any:
    """Returns on all ranks what `find` returns on rank 0, as JSON; raises its ConfigError on all.

    An OSError of `find` is raised on all ranks too: as ConfigError if the path is the cause (for
    example, it is a folder or may not be written), otherwise as StorageError.
    Only rank 0 looks, because on a network file system some nodes see a new folder later.
    """
    value: Any = None
    problems: list[str] = []
    failure = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            value = find()
        except ConfigError as error:
            problems = error.problems
        except OSError as error:
            text = str(error)
            if error.filename:
                text = f"{error.filename}: {error.strerror}"
            if error.errno in PATH_ERRORS:
                problems = [text]
            else:
                failure = text
    value, problems, failure = broadcast((value, problems, failure))
    if problems:
        raise ConfigError(problems)
    if failure:
        raise StorageError(failure)
    return value


def require_agreement(channel: Channel = TRAINING, **facts: str) -> None:
    """Raises ConfigError on all ranks unless all pass the same facts (name -> value or hash)."""
    everyone = gather(facts, channel)
    problems = []
    for rank, theirs in enumerate(everyone):
        for name in facts:
            if theirs[name] != everyone[0][name]:
                problems.append(
                    f"rank {rank}: {name} differs from rank 0's; expected the same command, data, "
                    "Python version, folder and kind of processor on all nodes"
                )
    if problems:
        raise ConfigError(problems)
