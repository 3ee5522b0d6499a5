"""Modules that hold a weight which another module or the loss uses.

What it is: parameters keep their names and their modules, while the computation moves elsewhere.
With `loss.num_chunks` the model returns hidden states, and the loss computes the output projection
(`optim/chunked_loss.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


class WeightHolder(nn.Module):
    """Holds a weight that another module or the loss uses; its forward is the identity."""

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        if weight is not None:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class DeferredOutput(WeightHolder):
    """Replaces the output layer and holds its weight; the loss computes the projection."""

    def __init__(self, output: nn.Module) -> None:
        weight = next(output.parameters(), None)  # None if the output layer is tied
        super().__init__(weight)
        # In a tuple, so that the embedding is not registered again as a submodule
        self._tied = (output,) if weight is None else ()

    @property
    def projection(self) -> Tensor:
        """The output matrix (V, D), or this rank's rows of it."""
        if self._tied:
            weight = self._tied[0].weight
            assert isinstance(weight, Tensor)
            return weight
        return self.weight


def defer_output(model: Llama) -> None:
    """Replaces the output layer, if this part of the model has one."""
    if not isinstance(model.output, nn.Identity):
        model.output = DeferredOutput(model.output)
