"""Two collectives along the tokens of a batch, which steps 5 and 6 use.

What it is: an all-gather and a reduce-scatter of tensors (B, S, D) along S. torch's collectives
work along the first dimension, so the parts of the ranks are put one after the other there.
What it costs: an all-gather of n parts sends n - 1 of them from each rank; a reduce-scatter too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(B, S/n, D) of each rank -> (B, S, D)."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=group)
    return torch.cat(out.chunk(ranks), dim=1)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(B, S, D) of each rank -> their sum, of which this rank gets its tokens, (B, S/n, D)."""
    ranks = dist.get_world_size(group)
    parts = torch.cat(x.chunk(ranks, dim=1))  # (n B, S/n, D)
    out = x.new_empty(parts.shape[0] // ranks, *parts.shape[1:])
    dist.reduce_scatter_single(out, parts, group=group)
    return out
