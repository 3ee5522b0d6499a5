"""Refuses a run that cannot fit, before its memory is allocated.

What it is: a lower bound, from the shapes of each rank's parameters: the parameters, and for those
that are trained their gradients and moments, which all exist in the update. Activations, gathered
weights and buffers come on top. Each rank has a GPU of its own; the ranks of a host share the
host's memory.
Why it is here: Linux gives out memory that it does not have, and later kills the process that
writes to it, without a message. `titanlite plan` estimates all that a run needs.
What it costs: a message from each rank at the start.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.schema import Config
from titanlite.distributed.agreement import broadcast_from_rank0, gather_on_rank0
from titanlite.distributed.dtensor import local_part
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.limits import usable_memory

logger = logging.getLogger("titanlite")

NEARLY_FULL = 0.8  # the part of the free memory from which on there is a warning
GIB = 2**30


class Required(NamedTuple):
    """Bytes that a rank needs at least, and those that are free."""

    first: int  # the first rank of its host
    on_gpu: int
    free_on_gpu: float  # infinite: not known
    on_host: int
    free_on_host: float  # for all ranks of the host together


def require_memory(parts: Sequence[nn.Module], config: Config, device: torch.device) -> None:
    """Raises ConfigError on all ranks if a GPU or a host has too little memory for these parts of
    the model, which are on the meta device. All ranks call it together.
    """
    own = required_memory(parts, config, device)
    ranks = gather_on_rank0(own)  # an empty list on the others
    broadcast_from_rank0(lambda: _require([Required(*rank) for rank in ranks]))


def required_memory(parts: Sequence[nn.Module], config: Config, device: torch.device) -> Required:
    """Computes what this rank needs, and reads what is free."""
    weights = 0  # and gradients
    moments = 0
    bytes_of_moment = getattr(torch, config.optimizer.state_dtype).itemsize
    for part in parts:
        for name, parameter in part.named_parameters():
            numbers = local_part(parameter).numel()
            weights += numbers * parameter.itemsize
            if parameter.requires_grad:
                weights += numbers * parameter.itemsize
                count = 1 if config.optimizer.uses_muon(name, parameter.ndim) else 2
                moments += numbers * count * bytes_of_moment
    rank = dist.get_rank()
    first = rank - int(os.environ.get("LOCAL_RANK", rank))  # the ranks of a host are consecutive
    if device.type != "cuda" or config.parallel.cpu_offload:
        return Required(first, 0, math.inf, weights + moments, usable_memory())
    free = torch.cuda.mem_get_info(device)[0]
    if config.parallel.optimizer_offload:
        return Required(first, weights, free, moments, usable_memory())
    return Required(first, weights + moments, free, 0, usable_memory())


def _require(ranks: list[Required]) -> None:
    """Raises ConfigError for GPUs and hosts that have too little; warns of those that are nearly
    full.
    """
    problems = []
    hosts: dict[int, list[Required]] = {}
    for number, rank in enumerate(ranks):
        problems += _problem(f"the GPU of rank {number}", rank.on_gpu, rank.free_on_gpu)
        hosts.setdefault(rank.first, []).append(rank)
    for first, of_host in hosts.items():
        name = "this host"
        if len(hosts) > 1:
            name = f"the host of ranks {first} to {first + len(of_host) - 1}"
        needed = sum(rank.on_host for rank in of_host)
        problems += _problem(name, needed, min(rank.free_on_host for rank in of_host))
    if problems:
        raise ConfigError(problems)


def _problem(name: str, needed: int, free: float) -> list[str]:
    if needed <= NEARLY_FULL * free:
        return []
    text = (
        f"{name}: parameters, gradients and moments need {needed / GIB:.3g} GiB, and "
        f"{free / GIB:.3g} GiB are free"
    )
    if needed <= free:
        logger.warning("%s; activations and buffers come on top (titanlite plan)", text)
        return []
    return [f"{text}; titanlite plan CONFIG says what a run needs in all"]
