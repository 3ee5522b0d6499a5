"""The router's choices and its auxiliary loss, for the single-process reference in `compare.py`.

What it is: the loss by its definition, as a term of the loss of each forward. It shares no code
with `optim/router_balance.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from titanlite.model.llama import Llama
from titanlite.model.moe import MixtureOfExperts


class Routing:
    """The routers of a model that is not parallel; nothing if it has no experts."""

    def __init__(self, model: Llama, weight: float) -> None:
        """`weight`: router_aux_loss."""
        self.weight = weight
        self.num_layers = len(model.layers)
        self.logits: dict[str, list[Tensor]] = {}  # of each forward of this step
        self.loads: dict[str, Tensor] = {}  # f_e of the step before
        self.chosen: dict[str, Tensor] = {}  # how often each expert was chosen in the last step
        self.experts_per_token = model.config.experts_per_token
        for name, block in model.layers.items():
            moe = block.feed_forward
            if isinstance(moe, MixtureOfExperts):
                self.logits[name] = []
                self.loads[name] = torch.full(
                    (moe.num_experts,), moe.experts_per_token / moe.num_experts
                )
                moe.router.register_forward_hook(functools.partial(self._record, name))

    def _record(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        self.logits[name].append(output.flatten(0, -2))

    def loss(self, tokens: int) -> Tensor | float:
        """The part of the auxiliary loss that the last forward adds; `tokens`: of the step."""
        total: Tensor | float = 0.0
        for name, logits in self.logits.items():
            probabilities = logits[-1].exp() / logits[-1].exp().sum(dim=-1, keepdim=True)
            load = self.loads[name].to(probabilities)
            total = total + len(load) * (load * probabilities.sum(dim=0) / tokens).sum()
        return self.weight * total / self.num_layers

    def finish_step(self) -> None:
        """Counts the choices of the step."""
        for name, logits in self.logits.items():
            scores = torch.cat(logits).detach()
            experts = scores.topk(self.experts_per_token, dim=-1).indices
            counts = torch.zeros(scores.shape[1], dtype=torch.int64)
            for expert in range(scores.shape[1]):
                counts[expert] = (experts == expert).sum()
            self.chosen[name] = counts
            self.loads[name] = counts / len(scores)
            logits.clear()
