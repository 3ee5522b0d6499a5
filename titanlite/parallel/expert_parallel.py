"""Expert parallel (GShard, arXiv 2006.16668): each rank holds some of the experts of a block, and
tokens travel to them.

What it is: the E experts of a block are cut over `ep` of the ranks that otherwise read different
tokens (dp_shard x cp): each holds E/ep experts. A rank routes its own tokens; an all-to-all sends
each row to the rank that holds its expert, which computes it, and a second all-to-all returns the
result. Attention and everything else stay as they are, so ep is no factor of the number of ranks.

    E = 4, ep = 2      rank 0: experts 0, 1    rank 1: experts 2, 3
    rank 0 has rows for experts 0 0 1 3: it keeps three, and sends one to rank 1
    rank 1 receives rows for expert 3 from rank 0 and for 2 2 3 from itself, and sorts them by
    expert: 2 2 3 3

Gradients: an expert's rank computes the tokens of all ep ranks, so its gradient is already summed
over them. It is summed over the ranks that hold the same experts, dp_replicate x expert_shard, by
FSDP, which also divides the experts' weights over expert_shard = dp_shard x cp / ep ranks.

With tp, experts are whole on each rank of the axis, not cut over it: sequence parallel has divided
the tokens over these ranks (B, S/tp, D), so each routes its own, and a row computes with a whole
expert. To cut experts over tp would need an all-gather of the tokens before and a reduce-scatter
after them, and would make their matrices, which are small, smaller still. The gradients of router
and experts are summed over tp, as those of norms are.

Why it is here: a model of many experts needs more memory than compute, and without ep FSDP gathers
all experts of a block on every rank. What it costs, per rank, block and local batch, for R = T k
rows: two all-to-alls in the forward and two in the backward, each b R D (ep-1)/ep bytes if experts
are chosen equally often, and one of E numbers, the counts, for which the host waits. Recomputation
repeats those of the forward. A rank whose experts are chosen more often computes longer, and needs
more memory; the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titanlite.distributed.mesh import Mesh
from titanlite.model.moe import Experts, MixtureOfExperts, multiply, restore_order

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


# Rows that go to and come from each rank (2, ep), and the sum of the first -> the same as lists.
# A planned step replaces `read_sizes`, because its tensors have no values
Reader: TypeAlias = Callable[[Tensor, int], tuple[list[int], list[int]]]


def apply_ep(model: Llama, mesh: Mesh) -> None:
    """Divides the experts of each block over ep, and sums gradients of router and experts over tp.

    Without both it changes nothing.
    """
    # Experts are whole on each rank of tp: their mesh has that axis so that gradients are summed
    axes: tuple[str, ...] = ("tp",)
    placements: list[Placement] = [Replicate()]
    if mesh.ep > 1:
        axes = ("ep", "tp")
        placements = [Shard(0), Replicate()]
    for block in model.layers.values():
        moe = block.feed_forward
        assert isinstance(moe, MixtureOfExperts)
        if mesh["tp"].size() > 1:
            router = OnLocalWeight(moe.router, mesh["tp"], [Replicate()], F.linear)
            moe.set_submodule("router", router)
        if mesh.ep * mesh["tp"].size() > 1:
            for name, linear in list(moe.experts.named_children()):
                local = OnLocalWeight(linear, mesh[axes], placements, multiply)
                moe.experts.set_submodule(name, local)
        if mesh.ep > 1:
            moe.set_submodule("experts", DividedExperts(moe.experts, mesh["ep"]))


class OnLocalWeight(nn.Module):
    """A layer that computes with this rank's part of its weight, which is a DTensor."""

    def __init__(
        self,
        layer: nn.Module,
        mesh: DeviceMesh,
        placements: list[Placement],
        product: Callable[..., Tensor],
    ) -> None:
        """`product`: the function of input and weight that the layer computes."""
        super().__init__()
        weight = distribute_tensor(
            layer.get_parameter("weight"), mesh, placements, src_data_rank=None
        )
        self.weight = nn.Parameter(weight)
        self.product = product

    def forward(self, x: Tensor, *ends: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        # Ranks along tp compute different tokens with the same weight: a gradient is one term of
        # a sum
        gradient = [Partial() if p == Replicate() else p for p in weight.placements]
        return self.product(x, weight.to_local(grad_placements=gradient), *ends)


def read_sizes(sizes: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Reads the sizes of messages, since those are numbers of the host, which waits here."""
    sent_to, got_from = sizes.tolist()
    return sent_to, got_from


class DividedExperts(Experts):
    """The experts of a block, of which this rank holds E/ep."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        """Takes over the layers of `experts`; `mesh`: the ep axis."""
        nn.Module.__init__(self)
        for name, layer in experts.named_children():
            self.add_module(name, layer)
        self.mesh = mesh
        self.read_sizes: Reader = read_sizes

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes rows (R, D), sorted by expert, on the ranks that hold their experts.

        counts (E,): this rank's rows for each expert. Returns (R, D) in the order of `rows`.
        """
        ep = self.mesh.size()
        group = self.mesh.get_group()
        local = len(counts) // ep  # experts per rank
        # (ep * E/ep): from each rank, rows for each expert here
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=group)
        both = torch.stack((counts, received)).unflatten(1, (ep, local)).sum(dim=2)  # (2, ep)
        sent_to, got_from = self.read_sizes(both, len(rows))

        arrived = AllToAll.apply(rows, sent_to, got_from, group)  # sorted by rank, then by expert
        # (ep * E/ep): the expert of each run of rows
        numbers = torch.arange(local, device=rows.device).repeat(ep)
        experts_of_rows = numbers.repeat_interleave(received, output_size=len(arrived))
        order = experts_of_rows.argsort(stable=True)  # by expert, then by rank
        own_counts = received.unflatten(0, (ep, local)).sum(dim=0)  # (E/ep,)
        outputs = super().forward(arrived.index_select(0, order), own_counts)
        outputs = restore_order(outputs, order)  # by rank, then by expert
        returned: Tensor = AllToAll.apply(outputs, got_from, sent_to, group)
        return returned


class AllToAll(torch.autograd.Function):
    """Sends consecutive rows to each rank, and receives rows from each; the backward reverses it.

    In the forward: rows (R, D), the number of rows to send to and to receive from each rank of the
    group -> (R', D), sorted by the rank that they come from.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = (sent, received, group)
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        return exchange(gradient, received, sent, group), None, None, None


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Makes one all-to-all of rows (R, D) with these sizes."""
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
