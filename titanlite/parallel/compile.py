"""torch.compile, one transformer block at a time.

What it is: the block's forward becomes one compiled graph. All blocks have the same code, so it is compiled once
and reused: a short wait however deep the model. Communication (fully_shard's hooks) stays outside of the graph.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config import Compile


def apply_compile(block: nn.Module, config: Compile) -> None:
    """Replaces the block's forward by its compiled version; `fullgraph` makes a graph break an error."""
    if config.enabled:
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True)
