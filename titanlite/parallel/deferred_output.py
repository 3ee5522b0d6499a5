"""Modules that hold a weight which another module or the loss uses.

What it is: parameters keep their names and their modules, while the computation moves elsewhere.
With `loss.num_chunks` the model returns hidden states, and the loss computes the output projection
(`optim/chunked_loss.py`).
What it costs: under tensor parallel the hidden states (B, S, D) are all-gathered, as they are for
an output layer. The last FSDP unit keeps its weights gathered after the forward, since the loss
uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.optim.chunked_loss import chunked_cross_entropy_sum
from titanlite.optim.loss import SummedLoss

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


class ChunkedLoss:
    """The summed loss of hidden states (B, S/tp, D) and labels (B, S), equal on all ranks of tp."""

    def __init__(
        self, output: DeferredOutput, num_chunks: int, loss: SummedLoss, mesh: DeviceMesh
    ) -> None:
        """`loss`: the function of logits (B, S, V/tp) and labels; `mesh`: the tp axis."""
        self.output = output
        self.num_chunks = num_chunks
        self.loss = loss
        self.mesh = mesh

    def with_loss(self, loss: SummedLoss) -> ChunkedLoss:
        """Returns one that calls another function of logits and labels on each chunk."""
        return ChunkedLoss(self.output, self.num_chunks, loss, self.mesh)

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.output.projection
        if self.mesh.size() > 1:
            sharded = DTensor.from_local(hidden, self.mesh, [Shard(1)])
            gathered = sharded.redistribute(placements=[Replicate()])
            # Each rank has logits for its part of the vocabulary, so its gradient of `hidden` is
            # one term of a sum.
            hidden = gathered.to_local(grad_placements=[Partial()])  # (B, S, D)
            assert isinstance(weight, DTensor)
            weight = weight.to_local()  # (V/tp, D)
        return chunked_cross_entropy_sum(hidden, weight, labels, self.num_chunks, self.loss)
