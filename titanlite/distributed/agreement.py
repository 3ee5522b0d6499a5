"""What all processes must know alike: one's finding, the same facts, any one's objection.

What it is: small objects over the process group, before training begins. All processes call each function together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from titanlite.config.schema import ConfigError


def broadcast_from_rank0(find: Callable[[], Any]) -> Any:
    """What `find` returns on rank 0, on all: on a network file system not all see a new folder at once.

    Raises ConfigError on all where it does there.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except ConfigError as error:
            found[1] = error.problems
    dist.broadcast_object_list(found)
    if found[1]:
        raise ConfigError(found[1])
    return found[0]


def require_agreement(**facts: str) -> None:
    """Raises ConfigError on all processes unless each of them holds the same facts (name -> value or hash)."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, facts)
    if problems := [
        f"rank {rank} has another {name} than rank 0: nodes need the same command, data, Python version, folder, and "
        "processors for which `auto` means the same"
        for rank, other in enumerate(found)
        for name in facts
        if other[name] != found[0][name]
    ]:
        raise ConfigError(problems)


def first_message(text: str) -> str:
    """What some process says; empty where none says anything. All call it together and get the same."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    found: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return next((f"rank {rank}: {said}" for rank, said in enumerate(found) if said), "")
