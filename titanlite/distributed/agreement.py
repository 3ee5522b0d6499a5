"""Agreement: small values exchanged between all ranks, so that all of them take the same branch.

What it is: `gather` gives every rank the values of all, `broadcast` that of rank 0, and the other functions decide from
these. What they decide is therefore the same everywhere: an error on one rank is an error on all, and no rank waits for
one that has left. All ranks of the group call each function together.
What it costs: two messages per rank to rank 0, and two broadcasts, of CPU tensors over gloo. Used while a run starts,
loads and saves, never within a step.
Values travel as JSON: `all_gather_object` would unpickle bytes that another process sent.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import ConfigError

PATH_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENAMETOOLONG)


class StorageError(RuntimeError):
    """Rank 0 could not read or write a file of the run; a full or failing disk may have recovered at a restart."""


def gather(value: Any, group: Any = None) -> list[Any]:
    """The JSON value of every rank, in the order of ranks."""
    return list(broadcast(gather_on_rank0(value, group), group))


def gather_on_rank0(value: Any, group: Any = None) -> list[Any]:
    """The JSON values of all ranks on rank 0 of the group, which receives them in turn; an empty list on the others."""
    if _alone(group):
        return [value]
    if dist.get_rank(group) != 0:
        content = _encode(value)
        dist.send(torch.tensor([len(content)]), group=group, group_dst=0)
        dist.send(content, group=group, group_dst=0)
        return []
    contents = []
    for rank in range(1, dist.get_world_size(group)):
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=group, group_src=rank)
        contents.append(torch.empty(int(length), dtype=torch.uint8))
        dist.recv(contents[-1], group=group, group_src=rank)
    return [value, *map(_decode, contents)]


def broadcast(value: Any, group: Any = None) -> Any:
    """Rank 0's JSON value."""
    if _alone(group):
        return value
    first = dist.get_rank(group) == 0
    content = _encode(value if first else None)
    length = torch.tensor([len(content)])
    dist.broadcast(length, group=group, group_src=0)
    if not first:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return _decode(content)


def _alone(group: Any) -> bool:
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    from titanlite.distributed.messages import read_message  # a single rank has none

    return read_message(content.numpy().tobytes())


def on_all_ranks(work: Callable[[], Any], group: Any = None, expected: type[ConfigError] = ConfigError) -> Any:
    """What `work` returns on this rank. If it raises on any rank, all raise, with the problems of all.

    That is `expected` if no rank has another error, ConfigError if all errors are such, and otherwise RuntimeError, or
    on the ranks that have it their own error.
    """
    result, unexpected, problems, kind = None, None, [], -1
    try:
        result = work()
    except ConfigError as error:
        problems, kind = error.problems, 0 if isinstance(error, expected) else 1
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        problems, kind, unexpected = [f"rank {rank}: {type(error).__name__}: {str(error)[:200]}"], 2, error
    everyone = gather((kind, problems), group)
    if (worst := max(kind for kind, _ in everyone)) < 0:
        return result
    if unexpected is not None:
        raise unexpected
    found = list(dict.fromkeys(problem for kind, own in everyone if kind == worst for problem in own))
    if worst == 2:
        raise RuntimeError("; ".join(found))
    raise (ConfigError if worst else expected)(found)


def broadcast_from_rank0(find: Callable[[], Any]) -> Any:
    """The JSON value that `find` returns on rank 0. Raises ConfigError on all ranks if `find` does.

    An OSError of `find` is raised on all ranks too: as ConfigError if the path is the cause, for example because it is
    a folder or may not be written, otherwise as StorageError.
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
            found[1 if error.errno in PATH_ERRORS else 2] = [message] if error.errno in PATH_ERRORS else message
    value, problems, failure = broadcast(found)
    if problems:
        raise ConfigError(problems)
    if failure:
        raise StorageError(failure)
    return value


def require_agreement(**facts: str) -> None:
    """Raises ConfigError on all ranks unless they all pass the same facts (name -> value or hash)."""
    everyone = gather(facts)
    if problems := [
        f"rank {rank}: {name} differs from rank 0's; expected the same command, data, Python version, folder and kind "
        "of processor on all nodes"
        for rank, other in enumerate(everyone)
        for name in facts
        if other[name] != everyone[0][name]
    ]:
        raise ConfigError(problems)


def first_message(text: str) -> str:
    """The first rank's text that is not empty, with its rank; empty if no rank has one."""
    everyone = gather(text)
    if len(everyone) == 1:
        return text
    return next((f"rank {rank}: {message}" for rank, message in enumerate(everyone) if message), "")
