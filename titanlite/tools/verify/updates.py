"""Clips and updates parameters for the single-process reference in `compare.py`.

What it is: each method as its paper writes it, on whole tensors in one process. It shares no code
with `optim/`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.schema import OptimizerConfig
from titanlite.model.llama import Llama


class Updates:
    """AdamW, or Muon for the matrices of the blocks and AdamW for the others."""

    def __init__(self, model: nn.Module, options: OptimizerConfig) -> None:
        self.options = options
        self.momentum = dict[str, Tensor]()
        self.muon: list[tuple[str, nn.Parameter, float, float]] = []
        adamw: list[dict[str, Any]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            lr = options.lr
            decay = 0.0
            linear = parameter.ndim >= 2 and name != "tok_embeddings.weight"
            if linear or options.decayed == "all":
                decay = options.weight_decay
            groups = [group for group in options.groups if fnmatchcase(name, group.pattern)]
            for group in groups[:1]:  # the first that matches
                lr = lr if group.lr is None else group.lr
                decay = decay if group.weight_decay is None else group.weight_decay
            if options.name == "muon" and name.startswith("layers.") and parameter.ndim >= 2:
                self.muon.append((name, parameter, lr, decay))
            else:
                adamw.append({"params": [parameter], "lr": lr, "weight_decay": decay})
        adamw = adamw or [{"params": []}]  # if all are Muon's
        self.adamw = torch.optim.AdamW(adamw, options.lr, options.betas, options.eps)

    @torch.no_grad()
    def step(self) -> None:
        """Makes one update from the gradients."""
        self.adamw.step()
        mu = self.options.muon_momentum
        for name, weight, lr, decay in self.muon:
            assert weight.grad is not None
            rows, columns = weight.shape[-2:]
            momentum = self.momentum.get(name, 0.0) * mu + weight.grad
            self.momentum[name] = momentum
            if self.options.muon_scale == "original":
                size = max(1.0, rows / columns)
            else:
                size = 0.04 * max(rows, columns)  # the update's rms becomes 0.2, as AdamW's
            nesterov = weight.grad + mu * momentum
            if weight.ndim == 3:  # a matrix for each expert
                update = torch.stack([newton_schulz(matrix) for matrix in nesterov])
            else:
                update = newton_schulz(nesterov)
            weight.sub_(lr * decay * weight + lr * size**0.5 * update)


def newton_schulz(g: Tensor) -> Tensor:
    """Jordan's iteration, which gives all singular values of `g` a size near 1; 0 stays 0."""
    x = g / g.norm().clamp(min=1e-7)  # an expert that no token has chosen has no gradient
    for _ in range(5):
        if len(g) <= len(g.T):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        else:
            x = 3.4445 * x - 4.7750 * x @ (x.T @ x) + 2.0315 * x @ (x.T @ x) @ (x.T @ x)
    return x


@torch.no_grad()
def clip(model: Llama, options: OptimizerConfig, max_norm: float, norm: float) -> None:
    """Clips the gradients: all by their global norm, or each unit by the norm of its weights.

    The latter is equation 3 of the NFNets paper.
    """
    last = "tok_embeddings.weight" if model.config.tied_embeddings else "output.weight"
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if options.clip == "agc":
            if name == last:
                continue
            most = options.agc_factor * parameter.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            size = gradient.norm(dim=-1, keepdim=True)
            gradient.copy_(torch.where(size > most, most / size * gradient, gradient))
        elif norm > max_norm > 0:
            gradient *= max_norm / norm
