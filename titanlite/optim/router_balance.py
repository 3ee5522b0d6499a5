"""Balances the router of a mixture of experts: an auxiliary loss over the whole global batch.

What it is: the loss of Switch Transformer (arXiv 2101.03961, section 2.2) for each block, averaged
over the blocks:

    router_aux_loss  E  sum_e f_e P_e

f_e is the number of tokens that chose expert e, divided by the number of tokens; P_e is the mean
probability of e. If all experts are chosen equally often, the sum is k, as in transformers. Only
P_e has a gradient: a token's probabilities of experts that are chosen often get smaller.
Why it is here: both are means over all tokens of a step: all local batches, all ranks. So the loss
does not depend on the layout, and an expert may be chosen often in one sequence, as long as others
are in other sequences (arXiv 2501.11873). Most programs compute it for each local batch of a rank
(docs/faults.md). Padding is not counted among the tokens: all of it has nearly the same hidden
state, so it would be counted for the same few experts.
How it is computed: the gradient of the first local batch needs the counts of the last. So the
gradient of a step uses f_e of the step before, whose counts are complete; the value that is logged
has f_e and P_e of the same step. In the first step f_e is k / E for all experts, whose gradient
is 0. The counts are taken in the backward, which runs once for each local batch, also if the
forward runs again (recomputation), and not in an evaluation.
What it costs: per step one all-reduce of 2 E numbers per block over each axis, and T E additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanlite.distributed.mesh import Mesh
from titanlite.model.moe import MixtureOfExperts, RouterProbabilities, choose, count

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


class RouterBalance:
    """The load of the experts in each block of this rank; without experts it does nothing.

    Stateful: the state is f_e of the last step, by block.
    """

    def __init__(
        self, parts: Sequence[Llama], weight: float, mesh: Mesh, device: torch.device
    ) -> None:
        """Replaces the module `probabilities` of each router in `parts`.

        `weight`: router_aux_loss; 0 only counts.
        """
        self.weight = weight
        self.mesh = mesh
        self.device = device
        self.num_layers = parts[0].config.num_layers
        self.num_experts = parts[0].config.num_experts
        self.layers: dict[str, ObservedProbabilities] = {}
        for part in parts:
            for name, block in part.layers.items():
                if isinstance(block.feed_forward, MixtureOfExperts):
                    moe = block.feed_forward
                    observed = ObservedProbabilities(moe, device)
                    moe.probabilities = observed
                    self.layers[name] = observed
        self.tokens = torch.ones((), dtype=torch.float64, device=device)  # of the last step

    def start_step(self, tokens: Tensor, scale: Tensor | float) -> None:
        """Sets what the backward adds to the gradients of the step that begins.

        tokens: the number of tokens of the global batch, a scalar on the device; scale: the loss
        scale of float16.
        """
        self.tokens = tokens.double()
        factor = self.weight * self.num_experts / (self.num_layers * self.tokens) * scale
        for layer in self.layers.values():
            layer.gradient = (factor * layer.load).float()
            layer.sums.zero_()

    def finish_step(self) -> None:
        """Sums counts and probabilities of the step over all ranks."""
        if not self.layers:
            return
        sums = torch.stack([layer.sums for layer in self.layers.values()])  # (blocks, 2, E)
        means = self.mesh.sum_tokens(sums) / self.tokens
        for layer, (load, probability) in zip(self.layers.values(), means, strict=True):
            layer.load.copy_(load)
            layer.mean_probability.copy_(probability)

    def columns(self) -> dict[str, Any]:
        """Returns columns of a logged step: the auxiliary loss without its weight, and of each
        block the load of the expert that is chosen most often, divided by the mean load.

        Waits for the device. All ranks call it together.
        """
        if not self.num_experts:
            return {}
        figures = torch.zeros(self.num_layers, 2, dtype=torch.float64, device=self.device)
        for name, layer in self.layers.items():
            loss = self.num_experts * (layer.load * layer.mean_probability).sum()
            figures[int(name)] = torch.stack((loss, layer.load.max() / layer.load.mean()))
        losses, loads = self.mesh.sum_stages(figures).T.tolist()
        # A block that no gradient passes is not counted: its mean load is 0
        known = {i: load for i, load in enumerate(loads) if not math.isnan(load)}
        total = sum(losses[i] for i in known)
        row: dict[str, Any] = {"router_loss": total / len(known) if known else None}
        row["expert_load"] = max(known.values(), default=None)
        return row | {f"expert_load/layers.{i}": known.get(i) for i in range(self.num_layers)}

    def state_dict(self) -> dict[str, Any]:
        return {f"layers.{name}": layer.load for name, layer in self.layers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, layer in self.layers.items():
            layer.load.copy_(state[f"layers.{name}"])

    def reset(self) -> None:
        """Begins with equal loads, as in a run's first step."""
        for layer in self.layers.values():
            layer.load.fill_(layer.experts_per_token / len(layer.load))


class ObservedProbabilities(RouterProbabilities):
    """Probabilities whose backward counts the choices, and adds the auxiliary loss's gradient."""

    def __init__(self, moe: MixtureOfExperts, device: torch.device) -> None:
        super().__init__()
        self.experts_per_token = moe.experts_per_token
        num = moe.num_experts
        # f_e of the last step (E,), and P_e. Plain attributes: no state of the model
        self.load = torch.full(
            (num,), moe.experts_per_token / num, dtype=torch.float64, device=device
        )
        self.mean_probability = torch.full_like(self.load, 1 / num)
        self.gradient = torch.zeros(num, device=device)
        # Counts and sums of probabilities (2, E), of this rank's tokens in this step
        self.sums = torch.zeros(2, num, dtype=torch.float64, device=device)

    def forward(self, logits: Tensor, padding: Tensor | None = None) -> Tensor:
        probabilities = super().forward(logits)
        if not torch.is_grad_enabled():
            return probabilities
        observed: Tensor = Observe.apply(probabilities, padding, self)
        return observed


class Observe(torch.autograd.Function):
    """The identity; its backward observes the probabilities and adds to their gradient."""

    @staticmethod
    def forward(
        ctx: Any, probabilities: Tensor, padding: Tensor | None, layer: ObservedProbabilities
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(probabilities, padding)
        return probabilities.view_as(probabilities)  # autograd records no input that is returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layer = ctx.layer
        probabilities, padding = ctx.saved_tensors
        num_experts = probabilities.shape[-1]
        of_tokens = probabilities.flatten(0, -2)  # (T, E)
        _, chosen = choose(of_tokens, layer.experts_per_token)
        added = layer.gradient.expand_as(gradient)
        if padding is not None:
            left_out = padding.flatten()[:, None]
            of_tokens = of_tokens.masked_fill(left_out, 0)
            chosen = chosen.masked_fill(left_out, num_experts)  # a number that is not counted
            added = added.masked_fill(padding[..., None], 0)
        layer.sums[0] += count(chosen.flatten().sort().values, num_experts)
        layer.sums[1] += of_tokens.sum(dim=0, dtype=layer.sums.dtype)
        return gradient + added, None, None
