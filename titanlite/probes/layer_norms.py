"""Norms of each layer's gradient and weights, and the size of its update.

What it is: on measured steps, for the embedding, each block, the last norm and the output, the
2-norms of the gradient (as the optimizer gets it, after clipping), of the weights before the
update, and of the update; the third divided by the second is the update ratio. A row of
metrics.jsonl has them as `gradient_norm/<layer>`, `weight_norm/<layer>` and `update_ratio/<layer>`,
with layers named as in the model.
Why it is here: the global norm does not show which layer diverges. A ratio far above 1e-3 in one
layer, or one that is zero, is a mistake in learning rate or initial weights that the loss shows
later.
What it costs: on measured steps a copy of this rank's weights until the update is done, 4 bytes per
parameter, sharded as they are, and three passes over them; one all-reduce of 24 bytes per layer;
and the host waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.dtensor import local_part
from titanlite.observe.metrics import Metrics
from titanlite.optim.clip import _replication, _square

logger = logging.getLogger("titanlite")
FIGURES = ("gradient_norm", "weight_norm", "update_ratio")


def sum_of_squares(
    pairs: Iterable[tuple[Tensor, Any]], twice: Collection[Tensor], device: torch.device
) -> Tensor:
    """This rank's part of a sum of squares; the sum of the parts of all ranks is that of the whole
    tensors.

    `pairs`: a parameter, and a tensor that is sharded as it is. `twice`: parameters that two
    pipeline stages hold.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Tensors by the number of ranks that hold them, as in `clip_grad_norm`
    held: dict[int, list[Tensor]] = {}
    for parameter, value in pairs:
        holders = _replication(parameter) * (2 if any(parameter is p for p in twice) else 1)
        held.setdefault(holders, []).append(local_part(value))
    for holders, tensors in held.items():
        total += _square(tensors).to(device) / holders
    return total


class LayerNorms:
    """Measures every `freq`-th step of an optimizer, between its hooks."""

    def __init__(
        self, stages: Any, optimizer: torch.optim.Optimizer, metrics: Metrics, freq: int
    ) -> None:
        self.metrics = metrics
        self.freq = freq
        self.twice = stages.shared_params
        llama = stages.model_parts[0].config
        ends = ["norm"] if llama.tied_embeddings else ["norm", "output"]
        self.layers = ["tok_embeddings", *(f"layers.{i}" for i in range(llama.num_layers)), *ends]
        self.held: dict[str, list[Tensor]] = {}  # this rank's parameters of each layer
        for name, parameter in (
            named for part in stages.model_parts for named in part.named_parameters()
        ):
            layer = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
            self.held.setdefault(layer, []).append(parameter)
        self._before: dict[str, list[Tensor]] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, *arguments: Any) -> None:
        if self.metrics.progress.step % self.freq == 0:
            self._before = {
                layer: [local_part(p).clone() for p in held] for layer, held in self.held.items()
            }

    @torch.no_grad()
    def _end(self, *arguments: Any) -> None:
        if not self._before:
            return
        squares = torch.zeros(3, len(self.layers), dtype=torch.float64, device=self.metrics.device)
        for layer, held in self.held.items():
            before = self._before.pop(layer)
            updates = [local_part(p) - old for p, old in zip(held, before, strict=True)]
            gradients = [(p, p.grad) for p in held if p.grad is not None]
            columns = gradients, zip(held, before, strict=True), zip(held, updates, strict=True)
            parts = [sum_of_squares(pairs, self.twice, squares.device) for pairs in columns]
            squares[:, self.layers.index(layer)] = torch.stack(parts)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(squares)
        gradient, weight, update = squares.sqrt()
        self._write(torch.stack((gradient, weight, update / weight)).tolist())

    def _write(self, figures: list[list[float]]) -> None:
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        shown = []
        for name, values in zip(FIGURES, figures, strict=True):
            row |= {
                f"{name}/{layer}": finite(value)
                for layer, value in zip(self.layers, values, strict=True)
            }
            (low, least), (high, most) = (
                f(zip(values, self.layers, strict=True)) for f in (min, max)
            )
            shown.append(f"{name} {low:.2e} ({least}) to {high:.2e} ({most})")
        self.metrics.write(row)
        logger.info(f"step {row['step']}: {', '.join(shown)}")


def finite(value: float) -> float | None:
    """The value; None, which is JSON's null, if it is NaN or infinite."""
    return value if math.isfinite(value) else None
