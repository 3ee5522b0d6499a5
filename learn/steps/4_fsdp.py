"""Step 4: FSDP (ZeRO-3). Each rank holds a part of every parameter, gradient and moment.

    python learn/steps/4_fsdp.py 2

What is new: a parameter is whole only while it is computed with. The unit of this is a module (a
block, the embedding, the norm with the output layer): before its forward one all-gather makes its
parameters whole, after it they are freed. Before its backward they are gathered again; after it a
reduce-scatter leaves each rank its part of the summed gradients, and both whole tensors are freed.
What it costs: 16 N / n bytes (4 N / n of them are gradients, until the update), and at its fullest
moment the parameters and gradients of one unit. 2 all-gathers and 1 reduce-scatter of 4 N bytes for
each local batch (so here a rank has one): 3 (n - 1) / n times 4 N sent, half as much again as in
step 2.
Read next: 5_tensor_parallel.py, which divides the computation of each layer.

As in FSDP2 every parameter is divided by itself, along dimension 0: rank r has rows r R/n to
(r+1) R/n of R rows. FSDP2 also starts the next all-gather while the current unit computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import STEPS, B, build_adamw, gradient_of, launch, read_step, summed_loss, update
from llama import Llama
from torch import Tensor, nn


class Unit:
    """The parameters of some modules, which are gathered, freed and reduced together.

    whole    the parameters of the modules; without memory while they are freed
    shards   this rank's rows of each, which the optimizer updates
    group    the ranks among which they are divided; None: all
    """

    def __init__(self, modules: list[nn.Module], group: dist.ProcessGroup | None = None) -> None:
        self.whole = [parameter for module in modules for parameter in module.parameters()]
        self.group = group
        self.ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        rows = [parameter.detach().chunk(self.ranks)[rank] for parameter in self.whole]
        self.shards = [nn.Parameter(part.clone()) for part in rows]
        self.sizes = [shard.numel() for shard in self.shards]
        self.missing = len(self.whole)  # gradients that this backward has not completed
        for parameter in self.whole:
            parameter.register_post_accumulate_grad_hook(self.completed)
        modules[0].register_forward_pre_hook(self.gather)
        modules[-1].register_forward_hook(self.after_forward)
        self.free()

    def after_forward(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Frees; gathers again when the gradient of the output is known, before the backward."""
        output.register_hook(lambda _: self.gather())
        self.free()

    def free(self) -> None:
        """Frees the memory of the whole parameters. The tensors stay, so autograd, which has saved
        them for the backward, finds the values again after the next `gather`.
        """
        # gap: free, gather, reduce-scatter
        for parameter in self.whole:
            parameter.untyped_storage().resize_(0)

    def gather(self, *_: Any) -> None:
        """Makes the whole parameters from the shards of all ranks, with one all-gather.

        Values are written by way of `parameter.data`: for autograd this is no change of a tensor
        that it has saved.
        """
        own = torch.cat([shard.detach().flatten() for shard in self.shards])
        gathered = torch.empty(self.ranks * len(own))
        dist.all_gather_single(gathered, own, group=self.group)
        by_rank = gathered.view(self.ranks, -1)
        parts = by_rank.split(self.sizes, dim=1)  # of each parameter: (ranks, numbers of a rank)
        for parameter, part in zip(self.whole, parts, strict=True):
            parameter.untyped_storage().resize_(4 * parameter.numel())
            parameter.data.copy_(part.reshape(parameter.shape))

    def completed(self, _: Tensor) -> None:
        """Autograd has completed the gradient of one parameter; after the last one, `reduce`."""
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.whole)
            self.reduce()

    def reduce(self) -> None:
        """Gives each shard its gradient, summed over the ranks, with one reduce-scatter.

        Then frees the gradients of the whole parameters, and the parameters.
        """
        gradients = [gradient_of(parameter).reshape(self.ranks, -1) for parameter in self.whole]
        own = torch.empty(sum(self.sizes))
        dist.reduce_scatter_single(own, torch.cat(gradients, dim=1).flatten(), group=self.group)
        for shard, gradient in zip(self.shards, own.split(self.sizes), strict=True):
            shard.grad = gradient.view_as(shard)
        for parameter in self.whole:
            parameter.grad = None
        self.free()
        # end of gap


def build_units(model: Llama, group: dist.ProcessGroup | None = None) -> list[Unit]:
    """One unit for the embedding, for each block, and for the norm with the output layer."""
    parts = [[model.tok_embeddings], *([layer] for layer in model.layers.values())]
    return [Unit(modules, group) for modules in (*parts, [model.norm, model.output])]


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    rank = dist.get_rank()
    local = B // dist.get_world_size()  # sequences of this rank, one local batch
    model = Llama()
    shards = [shard for unit in build_units(model) for shard in unit.shards]
    optimizer = build_adamw(shards)
    losses = []
    for step in range(1, STEPS + 1):
        tokens, labels = (rows[rank * local : (rank + 1) * local] for rows in read_step(step))
        loss = summed_loss(model(tokens), labels)
        loss.backward()
        square = torch.stack([gradient_of(shard).square().sum() for shard in shards]).sum()
        sums = torch.stack((square, loss.detach()))  # of each rank's part, in one all-reduce
        dist.all_reduce(sums)
        update(optimizer, sums[0].sqrt(), step)
        optimizer.zero_grad()
        losses.append(sums[1].item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   Unit         torch.distributed.fsdp.fully_shard        titanlite/parallel/fsdp.py: apply_fsdp
#   build_units  one call of fully_shard for each          titanlite/parallel/fsdp.py: fsdp_units
#   prefetching  set_modules_to_forward_prefetch           titanlite/parallel/fsdp.py: _prefetch
