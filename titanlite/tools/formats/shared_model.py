"""Shares a model's weights among processes, for commands that only compute forwards.

What it is: FSDP (`parallel/fsdp.py`) over all processes. Each reads and holds 1/n of every weight;
a forward gathers one block at a time and frees it again. So every process must take part in each
forward of any other one. `SharedModel` arranges that: before a forward a process tells the others,
and one that has no work left calls `follow`, in which it takes part in the forwards of the others,
with a single token, until none has work. So processes can have different amounts of work, and only
rank 0 may have some: for a single prompt.
Why not every process the same work: it would have to decide the same way after each token, on each
processor, and gain nothing.
What it costs: 4 N (n-1)/n bytes received per process and forward, for N parameters in fp32, and a
small all-reduce over gloo. Memory of a process: 4 N/n bytes, and the weights of the blocks that are
gathered at the moment. On the CPU that needs an allocator that returns freed memory to the system
(`RETURN_FREED_MEMORY` in `cli/several.py`). On one process there is nothing of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.config.schema import ParallelConfig
from titanlite.distributed.agreement import (
    PATIENT,
    bitwise_or,
    is_alone,
    on_all_ranks,
    require_agreement,
)
from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.rules.degrees import AXES
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.full_state import FullState
from titanlite.tools.formats.intact import require_intact
from titanlite.tools.formats.load_weights import fill, load_model, meta_model
from titanlite.tools.formats.selection import NEWEST, Selection

TIMEOUT = 604_800  # seconds of a collective: others wait while rank 0's text is read


def this_rank() -> int:
    """The rank of this process; 0 if there are no others."""
    return 0 if is_alone() else dist.get_rank()


def num_ranks() -> int:
    return 1 if is_alone() else dist.get_world_size()


def open_shared(path: Path, selection: Selection = NEWEST) -> FullState:
    """Opens a checkpoint of any format on all processes; rank 0 verifies its weights.

    Raises ConfigError or CorruptCheckpoint, on all processes.
    """

    def open_and_verify() -> FullState:
        full = open_full_state(path, selection)
        if this_rank() == 0:
            require_intact(full)
        return full

    full = on_all_ranks(open_and_verify, PATIENT)
    require_agreement(checkpoint=str(full.path))  # a run may save another step meanwhile
    return full


class SharedModel:
    """This process's part of a checkpoint's model, and what the others have to know of its work."""

    def __init__(self, full: FullState, device: torch.device, seq_len: int) -> None:
        """All processes call it together. `seq_len`: tokens of the longest sequence.

        Raises CorruptCheckpoint or ConfigError, on all processes.
        """
        self.follows = False
        if is_alone():
            self.model = load_model(full, device, seq_len)
            return
        self.model = on_all_ranks(lambda: meta_model(full, seq_len), PATIENT)
        mesh = Mesh(device.type, dict.fromkeys(AXES, 1) | {"dp_shard": num_ranks()}, TIMEOUT)
        config = ParallelConfig(reshard_after_forward="always")
        apply_fsdp(self.model, config, mesh, torch.float32, torch.float32)
        self.model.to_empty(device=device)
        self.model.reset_rope(device)
        on_all_ranks(lambda: fill(full, self.model.state_dict()), PATIENT)
        self.model.eval()
        # Before FSDP's own hook, which gathers weights
        self.model.register_forward_pre_hook(self._announce, prepend=True)

    def _announce(self, module: Llama, inputs: tuple[Any, ...]) -> None:
        """Tells the others that a forward comes."""
        if not self.follows:
            bitwise_or(1)

    def follow(self) -> None:
        """Takes part in the forwards of the others until no process has work left.

        Each process calls it after its own work, also one that had none.
        """
        self.follows = True
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.rope.device)
        with torch.no_grad():
            while bitwise_or(0):
                self.model(token)
        self.follows = False

    def describe(self) -> str:
        """How many parameters the model has, and on several processes each of them."""
        total = f"{self.model.config.num_parameters:,} parameters"
        if is_alone():
            return total
        own = 0
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                own += parameter.to_local().numel()
            else:
                own += parameter.numel()
        return f"{total}, {own:,} of them in the process of rank 0 of {num_ranks()}"
