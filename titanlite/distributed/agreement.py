"""Agreement: small values exchanged between all ranks, so that all of them take the same branch.

What it is: `gather` gives every rank the values of all, `broadcast` that of rank 0, and the other
functions decide from these. So all ranks reach the same decision: an error on one rank is raised on
all, and no rank waits for one that has exited. All ranks call each function together.
What it costs: two messages from each rank to rank 0, and two to each rank along a tree, of CPU
tensors over gloo. Used while a run starts, loads and saves, never by the training thread within a
step.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from titanlite.runtime.errors import ConfigError

PATH_ERRORS = (
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENAMETOOLONG,
)


class JoinError(RuntimeError):
    """Other nodes did not start in time, or cannot be reached."""


class StorageError(RuntimeError):
    """Rank 0 could not read or write a file of the run; a full or failing disk may have recovered
    at a restart.
    """


class Channel(NamedTuple):
    """The tag of messages, and how long a rank waits for each; 0: as long as the process group.

    Only one thread of a process may use a channel at a time: the main thread waits for a save
    before it uses PATIENT.
    """

    tag: int
    timeout: timedelta


TRAINING = Channel(1, timedelta(0))  # 0 is torch's default tag, and 3 that of `exchange.bitwise_or`
# To prepare data, to save and to load takes some ranks much longer than others: the watchdog
# detects hangs, not this.
PATIENT = Channel(2, timedelta(days=1))


def gather(value: Any, channel: Channel = TRAINING) -> list[Any]:
    """The JSON value of every rank, in the order of ranks."""
    return list(broadcast(gather_on_rank0(value, channel), channel))


def gather_on_rank0(value: Any, channel: Channel = TRAINING) -> list[Any]:
    """The JSON values of all ranks on rank 0, which receives them in turn; an empty list on the
    others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    from titanlite.distributed import exchange  # not imported by a run of one rank

    return exchange.gather_on_rank0(value, *channel)


def broadcast(value: Any, channel: Channel = TRAINING) -> Any:
    """Rank 0's JSON value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    from titanlite.distributed import exchange  # not imported by a run of one rank

    return exchange.broadcast(value, *channel)


def on_all_ranks(
    work: Callable[[], Any], channel: Channel = TRAINING, expected: type[ConfigError] = ConfigError
) -> Any:
    """What `work` returns on this rank. If it raises on any rank, all raise, with the problems of
    all.

    The exception is `expected` if all errors are of that type, ConfigError if all are ConfigErrors,
    otherwise the original error on the ranks where one was raised, and RuntimeError on the others.
    """
    result = None
    unexpected = None
    problems = []
    kind = -1
    try:
        result = work()
    except ConfigError as error:
        problems = error.problems
        kind = 0 if isinstance(error, expected) else 1
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        problems = [f"rank {rank}: {type(error).__name__}: {str(error)[:200]}"]
        kind = 2
        unexpected = error
    everyone = gather((kind, problems), channel)
    worst = max(kind for kind, _ in everyone)
    if worst < 0:
        return result
    if unexpected is not None:
        raise unexpected
    found = list(
        dict.fromkeys(problem for kind, own in everyone if kind == worst for problem in own)
    )
    if worst == 2:
        raise RuntimeError("; ".join(found))
    raise (ConfigError if worst else expected)(found)


def broadcast_from_rank0(find: Callable[[], Any]) -> Any:
    """The JSON value that `find` returns on rank 0. Raises ConfigError on all ranks if `find` does.

    An OSError of `find` is raised on all ranks too: as ConfigError if the path is the cause, for
    example because it is a folder or may not be written, otherwise as StorageError.
    On a network file system some nodes see a new folder later than others, so rank 0 looks for all.
    """
    found: list[Any] = [None, [], ""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found[0] = find()
        except ConfigError as error:
            found[1] = error.problems
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            found[1 if error.errno in PATH_ERRORS else 2] = (
                [message] if error.errno in PATH_ERRORS else message
            )
    value, problems, failure = broadcast(found)
    if problems:
        raise ConfigError(problems)
    if failure:
        raise StorageError(failure)
    return value


def require_agreement(channel: Channel = TRAINING, **facts: str) -> None:
    """Raises ConfigError on all ranks unless they all pass the same facts (name -> value or hash)."""
    everyone = gather(facts, channel)
    problems = [
        f"rank {rank}: {name} differs from rank 0's; expected the same command, data, Python version, folder and kind "
        "of processor on all nodes"
        for rank, other in enumerate(everyone)
        for name in facts
        if other[name] != everyone[0][name]
    ]
    if problems:
        raise ConfigError(problems)
