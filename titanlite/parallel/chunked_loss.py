"""Output projection and loss together, for one chunk of tokens at a time.

What it is: logits are V numbers for each token, by far the largest tensor of a step. Here the model
returns hidden states, and the loss computes the output projection and the cross entropy of one
chunk of tokens after the other (`optim/chunked.py`), so the logits of only one chunk exist at a
time. Parameters keep their names and their modules.
What it costs: nothing is computed twice. Memory: 1/num_chunks of the logits, their log-softmax and
gradient, and one fp32 gradient of the output weight. Under tensor parallel the hidden states (B, S,
D) are all-gathered, as they are for an output layer. The last FSDP unit keeps its weights gathered
after the forward, since the loss uses them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.optim.chunked import chunked_cross_entropy_sum
from titanlite.optim.loss import SummedLoss


class WeightHolder(nn.Module):
    """Holds a weight that another module or the loss uses; its forward is the identity."""

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        if weight is not None:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class DeferredOutput(WeightHolder):
    """Replaces the output layer and holds its weight, with which the loss computes the projection."""

    def __init__(self, output: Any) -> None:
        tied = not any(True for _ in output.parameters())
        super().__init__(None if tied else output.weight)
        # In a tuple, so that the embedding is registered once
        self._tied = (output,) if tied else ()

    @property
    def projection(self) -> Any:
        """(V, D), or this rank's rows of it."""
        return self._tied[0].weight if self._tied else self.weight


def defer_output(model: Any) -> None:
    """Replaces the output layer, if this part of the model has one."""
    if not isinstance(model.output, nn.Identity):
        model.output = DeferredOutput(model.output)


class ChunkedLoss:
    """Hidden states (B, S/tp, D) and labels (B, S) -> the summed loss, equal on all ranks along tp."""

    def __init__(
        self, output: DeferredOutput, num_chunks: int, loss: SummedLoss, mesh: DeviceMesh
    ) -> None:
        self.output = output
        self.num_chunks = num_chunks
        self.loss = loss
        self.mesh = mesh

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.output.projection
        if self.mesh.size() > 1:
            whole = DTensor.from_local(hidden, self.mesh, [Shard(1)]).redistribute(
                placements=[Replicate()]
            )
            # Each rank has the logits of its part of the vocabulary, so its gradient of `hidden` is
            # one term of a sum.
            hidden = whole.to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        return chunked_cross_entropy_sum(hidden, weight, labels, self.num_chunks, self.loss)
