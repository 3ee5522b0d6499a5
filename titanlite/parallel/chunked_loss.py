"""Output projection and loss in one, for some tokens at a time.

What it is: logits are a row of V numbers for each token, the largest tensor of a step by far. Here the model leaves its
output projection to the loss, and that takes both by chunks (`optim/loss.py`), so the logits of one chunk are all
there is. Parameters keep their names and their places.
What it costs: nothing is computed twice. Memory: 1/n of the logits, their log-softmax and gradient; and a gradient of
the output's weight in fp32. Under tensor parallel the hidden states (B, S, D) are gathered as for the projection alone.

The last unit of FSDP keeps its weights after the forward, since the loss needs them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.optim.loss import SummedLoss, chunked_cross_entropy_sum


class DeferredOutput(nn.Module):
    """In place of the output: hands on what it is given, and holds the weight that the loss projects with."""

    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        # Tied, it has no parameter of its own. In a tuple, so that it is no submodule of two.
        self._tied = () if output._parameters else (output,)
        if not self._tied:
            self.weight = output.weight

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def projection(self) -> Any:
        """(V, D), or this process's rows of it."""
        return self._tied[0].weight if self._tied else self.weight


def defer_output(model: Any, num_chunks: int) -> None:
    """Leaves the output of a part of the model that has one to the loss; nothing for a single chunk."""
    if num_chunks > 1 and not isinstance(model.output, nn.Identity):
        model.output = DeferredOutput(model.output)


class ChunkedLoss:
    """(hidden states (B, S/T, D), labels (B, S)) -> the summed loss of a part of the model, over the tp axis."""

    def __init__(self, output: DeferredOutput, num_chunks: int, loss: SummedLoss, mesh: DeviceMesh) -> None:
        self.output, self.num_chunks, self.loss, self.mesh = output, num_chunks, loss, mesh

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.output.projection
        if self.mesh.size() > 1:
            whole = DTensor.from_local(hidden, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
            # Each process has logits of its part of the vocabulary only, so their gradients are parts of a sum.
            hidden, weight = whole.to_local(grad_placements=[Partial()]), weight.to_local()
        return chunked_cross_entropy_sum(hidden, weight, labels, self.num_chunks, self.loss)
