"""Measures norms of each layer's gradient, weights and update.

What it is: on measured steps, for the embedding, each block, the last norm and the output, the
2-norms of the gradient (as the optimizer gets it, after clipping), of the weights before the
update, and of the update. The update ratio is the norm of the update divided by that of the
weights. A row of metrics.jsonl has `gradient_norm/<layer>`, `weight_norm/<layer>` and
`update_ratio/<layer>`, with layers named as in the model.
Why it is here: the global norm does not show which layer diverges. A ratio that is far above 1e-3
in one layer, or zero, points to a mistake in learning rate or initial weights before the loss shows
it.
What it costs: on measured steps a copy of this rank's weights until the update is done, 4 bytes per
parameter, sharded as they are, and three passes over them; one all-reduce of 24 bytes per layer;
and the host waits for the device.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.agreement import is_alone
from titanlite.distributed.dtensor import local_part, sum_of_squares
from titanlite.observe.metrics import Metrics
from titanlite.parallel.stages import Stages

logger = logging.getLogger("titanlite")
FIGURES = ("gradient_norm", "weight_norm", "update_ratio")


class LayerNorms:
    """Measures every `metrics.layer_norms_freq`-th step; 0: none."""

    def __init__(self, freq: int, stages: Stages, metrics: Metrics) -> None:
        self.freq = freq
        self.metrics = metrics
        self.shared_params = stages.shared_params
        llama = stages.model_parts[0].config
        self.layers = ["tok_embeddings"]
        self.layers += [f"layers.{i}" for i in range(llama.num_layers)]
        self.layers.append("norm")
        if not llama.tied_embeddings:
            self.layers.append("output")
        self.parameters: dict[str, list[Tensor]] = {}  # layer -> this rank's parameters
        for part in stages.model_parts:
            for name, parameter in part.named_parameters():
                layer = layer_of(name)
                self.parameters.setdefault(layer, []).append(parameter)
        self._before: dict[str, list[Tensor]] = {}  # layer -> weights before the update

    @torch.no_grad()
    def before_update(self) -> None:
        """Copies weights if it is time; call it before each update, after clipping."""
        if self.freq == 0 or self.metrics.progress.step % self.freq != 0:
            return
        for layer, parameters in self.parameters.items():
            self._before[layer] = [local_part(parameter).clone() for parameter in parameters]

    @torch.no_grad()
    def after_update(self) -> None:
        """Measures if it is time; call it after each update, before gradients are freed."""
        if not self._before:
            return
        squares = torch.zeros(3, len(self.layers), dtype=torch.float64, device=self.metrics.device)
        for layer, parameters in self.parameters.items():
            before = self._before.pop(layer)
            gradients = []
            updates = []
            for parameter, old in zip(parameters, before, strict=True):
                if parameter.grad is not None:
                    gradients.append((parameter, parameter.grad))
                updates.append((parameter, local_part(parameter) - old))
            # The weights before the update: the ratio compares an update with what it changes
            weights = list(zip(parameters, before, strict=True))
            column = self.layers.index(layer)
            for row, pairs in enumerate((gradients, weights, updates)):
                squares[row, column] = sum_of_squares(pairs, self.shared_params, squares.device)
        if not is_alone():
            dist.all_reduce(squares)
        gradient, weight, update = squares.sqrt()
        self._write(torch.stack((gradient, weight, update / weight)).tolist())

    def _write(self, figures: list[list[float]]) -> None:
        row: dict[str, Any] = {"step": self.metrics.progress.step}
        shown = []
        for name, values in zip(FIGURES, figures, strict=True):
            for layer, value in zip(self.layers, values, strict=True):
                row[f"{name}/{layer}"] = finite(value)
            lowest, lowest_layer = min(zip(values, self.layers, strict=True))
            highest, highest_layer = max(zip(values, self.layers, strict=True))
            shown.append(f"{name} {lowest:.2e} ({lowest_layer}) to {highest:.2e} ({highest_layer})")
        self.metrics.write(row)
        logger.info(f"step {row['step']}: {', '.join(shown)}")


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: layers.3 for layers.3.attention.wq.weight."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2])
    return parts[0]


def finite(value: float) -> float | None:
    """Replaces NaN and infinity by None, which is JSON's null."""
    return value if math.isfinite(value) else None
