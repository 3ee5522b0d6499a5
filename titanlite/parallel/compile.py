"""torch.compile, one transformer block at a time (PyTorch 2, ASPLOS 2024).

What it is: the block's forward becomes one compiled graph. All blocks have the same code, so it is compiled once
and reused: a short wait however deep the model. fully_shard's communication stays outside of the graph, in hooks;
that of tensor and context parallel is inside, where the compiler can move it. The loss can be compiled too.

What it costs: seconds at the first step, for each kind of block (context parallel processes have masks of their own,
so each compiles its own). What it saves: reading and writing of intermediate results that are fused away.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config_parallel import Compile


def apply_compile(block: nn.Module, config: Compile) -> None:
    """Replaces the block's forward by its compiled version; `fullgraph` makes a graph break an error."""
    if config.enabled:
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True)
