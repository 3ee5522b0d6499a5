"""Exchange: JSON values and bits between ranks, by messages over gloo.

What it is: the transport of `agreement.py`, and of the requests in `signals.py`. Values are sent as
JSON, because `all_gather_object` unpickles bytes from other processes. Each message has a tag, so
that the saving thread and the main thread can use one process group at the same time. With
collectives each thread would need a separate group, and every rank a second socket to every other
rank.
What it costs: two messages for a value, for its length and for itself; for bits see `bitwise_or`.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.messages import read_message
from titanlite.distributed.process_group import host_group

# Number of ranks from which `bitwise_or` sends messages instead of calling all_reduce. Without
# network delays the ring is faster below, and at 32 both take equally long; with delays, messages
# are faster (benchmarks/agreement.py).
MANY = 32
BITS = 3  # tag of the messages of `bitwise_or`


def gather_on_rank0(value: Any, tag: int, timeout: timedelta) -> list[Any]:
    """The JSON values of all ranks on rank 0, which receives them in turn; an empty list on the
    others.
    """
    if dist.get_rank() != 0:
        _send(_encode(value), 0, tag, timeout)
        return []
    contents = [_receive(rank, tag, timeout) for rank in range(1, dist.get_world_size())]
    return [value, *map(_decode, contents)]


def broadcast(value: Any, tag: int, timeout: timedelta) -> Any:
    """Rank 0's JSON value. Along a tree: the ranks that have it double with each round."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    reached = 1
    content = _encode(value if rank == 0 else None)
    while reached < size:
        if reached <= rank < 2 * reached:
            content = _receive(rank - reached, tag, timeout)
        elif rank < reached and rank + reached < size:
            _send(content, rank + reached, tag, timeout)
        reached *= 2
    return _decode(content)


def bitwise_or(bits: int) -> int:
    """The bits that any rank has.

    gloo passes an all-reduce around the ring of ranks, twice: little work, but 2 (N - 1) messages
    one after another. From MANY ranks on, in round i each rank sends its bits to rank + 2^i (mod
    N): log2 N rounds (docs/multinode.md).
    """
    found = torch.tensor(bits)
    rank = dist.get_rank()
    size = dist.get_world_size()
    distance = 1
    if size < MANY:
        dist.all_reduce(found, dist.ReduceOp.BOR, host_group())
        return int(found)
    while distance < size:
        other = torch.zeros_like(found)
        receiving = _receiving(other, (rank - distance) % size, BITS)
        _sending(found, (rank + distance) % size, BITS).wait()
        receiving.wait()
        found = found | other
        distance = 2 * distance
    return int(found)


def _sending(content: Tensor, rank: int, tag: int) -> Any:
    return dist.isend(content, rank, host_group(), tag)


def _receiving(memory: Tensor, rank: int, tag: int) -> Any:
    return dist.irecv(memory, rank, host_group(), tag)


def _send(content: Tensor, rank: int, tag: int, timeout: timedelta) -> None:
    _sending(torch.tensor([len(content)]), rank, tag).wait(timeout)
    _sending(content, rank, tag).wait(timeout)


def _receive(rank: int, tag: int, timeout: timedelta) -> Tensor:
    length = torch.zeros(1, dtype=torch.int64)
    _receiving(length, rank, tag).wait(timeout)
    content = torch.empty(int(length), dtype=torch.uint8)
    _receiving(content, rank, tag).wait(timeout)
    return content


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return read_message(content.numpy().tobytes())
