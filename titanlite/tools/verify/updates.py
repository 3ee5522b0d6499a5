"""The clipping and parameter updates of the single-process reference in `compare.py`.

What it is: each as its paper writes it, on whole tensors in one process. It shares no code with
`optim/`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.schema import OptimizerConfig


class Updates:
    """AdamW, or Muon for the matrices of the blocks and AdamW for the others."""

    def __init__(self, model: nn.Module, options: OptimizerConfig) -> None:
        self.options = options
        self.momentum = dict[str, Tensor]()
        self.muon: list[tuple[str, nn.Parameter, float, float]] = []
        adamw: list[dict[str, Any]] = []
        for name, parameter in model.named_parameters():
            group = next(
                (group for group in options.groups if fnmatchcase(name, group.pattern)), None
            )
            lr = options.lr if group is None or group.lr < 0 else group.lr
            linear = parameter.ndim == 2 and name != "tok_embeddings.weight"
            decay = options.weight_decay if linear or options.decayed == "all" else 0.0
            decay = decay if group is None or group.weight_decay < 0 else group.weight_decay
            if options.name == "muon" and name.startswith("layers.") and parameter.ndim == 2:
                self.muon.append((name, parameter, lr, decay))
            else:
                adamw.append({"params": [parameter], "lr": lr, "weight_decay": decay})
        self.adamw = torch.optim.AdamW(adamw, options.lr, options.betas, options.eps)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        self.adamw.step()
        for name, weight, lr, decay in self.muon:
            assert weight.grad is not None
            mu, (rows, columns) = self.options.muon_momentum, weight.shape
            momentum = self.momentum[name] = self.momentum.get(name, 0.0) * mu + weight.grad
            size = (
                max(1.0, rows / columns)
                if self.options.muon_scale == "original"
                else 0.04 * max(rows, columns)
            )
            weight.sub_(
                lr * decay * weight + lr * size**0.5 * newton_schulz(weight.grad + mu * momentum)
            )


def newton_schulz(g: Tensor) -> Tensor:
    """Jordan's iteration: a matrix with the singular vectors of `g` and singular values near 1."""
    x = g / g.norm()
    for _ in range(5):
        if len(g) <= len(g.T):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        else:
            x = 3.4445 * x - 4.7750 * x @ (x.T @ x) + 2.0315 * x @ (x.T @ x) @ (x.T @ x)
    return x


@torch.no_grad()
def clip(model: Any, options: OptimizerConfig, max_norm: float, norm: float) -> None:
    """Clips the gradients: all by their global norm, or each unit by the norm of its weights
    (NFNets, equation 3).
    """
    last = "tok_embeddings.weight" if model.config.tied_embeddings else "output.weight"
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if options.clip == "agc":
            most = options.agc_factor * parameter.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            size = gradient.norm(dim=-1, keepdim=True)
            gradient.copy_(
                torch.where((size > most) & (name != last), most / size * gradient, gradient)
            )
        elif norm > max_norm > 0:
            gradient *= max_norm / norm
