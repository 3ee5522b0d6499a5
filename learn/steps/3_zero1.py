"""Step 3: ZeRO-1. Each rank updates a part of the parameters, and has only that part's moments.

    python learn/steps/3_zero1.py 2

What is new: in step 2 all ranks compute the same update from the same gradients and hold the same
moments. Here rank r receives the sum of part r of the gradients only (a reduce-scatter), updates
part r of the parameters, and then all ranks exchange their updated parts (an all-gather).
What it costs: AdamW's moments take 8 N / n bytes instead of 8 N; parameters and gradients stay 8 N,
and the part's summed gradient takes 4 N / n.
A ring all-reduce is a reduce-scatter followed by an all-gather, so the bytes sent are those of
step 2: 2 (n - 1) / n times 4 N. The norm of the gradients now needs an all-reduce of 4 bytes.
Read next: 4_fsdp.py, which divides parameters and gradients too.

AdamW updates each number by itself, so the parts may be cut anywhere: all parameters lie one after
the other in one flat tensor, which is cut into n equal parts. Step 2's buckets would let the
reduce-scatter overlap with the backward; they are left out here to show the division alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import STEPS, B, build_adamw, launch, read_step, summed_loss, update
from llama import Llama
from torch import Tensor, nn

LOCAL_B = 2  # sequences of a local batch


class Zero1:
    """The parameters of a model, of which this rank updates one part.

    flat       (N + padding,): all parameters; each parameter is a view of it
    part       this rank's part of `flat`: a view of it as a parameter, which the optimizer updates
    gradients  (N + padding,): all gradients of this rank; each gradient is a view of it
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat, self.part = self.flatten(dist.get_rank(), dist.get_world_size())
        self.gradients = torch.empty(0)

    def flatten(self, rank: int, world_size: int) -> tuple[Tensor, nn.Parameter]:
        """`flat` and `part`. The length of `flat` is a multiple of the number of ranks.

        Each model parameter's `data` becomes its place in `flat`, with its values.
        """
        # gap: the flat tensors, and the collectives before and after the update
        length = sum(self.sizes)
        padding = -length % world_size
        values = [parameter.detach().flatten() for parameter in self.parameters]
        flat = torch.cat([*values, torch.zeros(padding)])
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            parameter.data = piece.view_as(parameter)
        return flat, nn.Parameter(flat.chunk(world_size)[rank])  # shares the memory of `flat`

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The place of each parameter in a flat tensor, without the padding."""
        return list(flat[: sum(self.sizes)].split(self.sizes))

    def start_step(self) -> None:
        """Before the first backward of an optimizer step: `gradients` is zero, with a view of it
        as the gradient of each parameter of the model.
        """
        self.gradients = torch.zeros_like(self.flat)
        for parameter, piece in zip(self.parameters, self.pieces(self.gradients), strict=True):
            parameter.grad = piece.view_as(parameter)

    def reduce_gradients(self) -> Tensor:
        """Gives `part` its gradient, summed over the ranks.

        Returns the norm of the whole gradient, of which this rank has only a part.
        """
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_single(self.part.grad, self.gradients)
        square = self.part.grad.square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def gather_parameters(self) -> None:
        """After the update of `part`: all ranks receive all parts, into `flat`."""
        with torch.no_grad():
            dist.all_gather_single(self.flat, self.part.detach().clone())
        # end of gap


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    rank = dist.get_rank()
    local = B // dist.get_world_size()  # sequences of this rank
    model = Llama()
    zero = Zero1(model)
    optimizer = build_adamw([zero.part])  # so its moments are as long as the part
    losses = []
    for step in range(1, STEPS + 1):
        tokens, labels = (rows[rank * local : (rank + 1) * local] for rows in read_step(step))
        loss = torch.zeros(())
        zero.start_step()
        for first in range(0, local, LOCAL_B):
            part = slice(first, first + LOCAL_B)
            local_loss = summed_loss(model(tokens[part]), labels[part])
            local_loss.backward()
            loss += local_loss.detach()
        norm = zero.reduce_gradients()
        update(optimizer, norm, step)
        zero.gather_parameters()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   Zero1     torch.distributed.optim.ZeroRedundancyOptimizer, which divides by whole parameters.
#             titanlite divides everything; with reshard_after_forward = "never" parameters stay
#             whole until the end of the backward     titanlite/parallel/fsdp.py: _reshard
#   the norm  torch.nn.utils.get_total_norm           titanlite/optim/clip.py: clip_gradients
