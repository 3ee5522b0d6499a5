"""torch.compile, one transformer block at a time (PyTorch 2, ASPLOS 2024).

What it is: the block's forward becomes one compiled graph. All blocks have the same code, so it is compiled once
and reused: a short wait however deep the model. fully_shard's communication stays outside of the graph, in hooks;
that of tensor and context parallel is inside, where the compiler can move it. The loss can be compiled too.

On CUDA it is the default: it saves a sixth of a step and memory. On CPU a step is matrix products, which it leaves as
they are: it gains no more than a few percent there, and has to be asked for.

What it costs: seconds at the first step, for each kind of block (context parallel processes have masks of their own,
so each compiles its own). What it saves: reading and writing of intermediate results that are fused away.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config import Config
from titanlite.config_parallel import SPLIT_BACKWARD
from titanlite.parallel.mesh import Mesh


def compiles_blocks(config: Config, mesh: Mesh) -> bool:
    """What `compile.enabled` means on these processes."""
    if config.compile.enabled == "auto":
        splits = mesh["pp"].size() > 1 and config.parallel.pp_schedule in SPLIT_BACKWARD
        return config.recompute.mode == "memory_budget" or (mesh.device_type == "cuda" and not splits)
    return config.compile.enabled == "true"


def apply_compile(block: nn.Module, backend: str) -> None:
    """Replaces the block's forward by its compiled version; `fullgraph` makes a graph break an error."""
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
