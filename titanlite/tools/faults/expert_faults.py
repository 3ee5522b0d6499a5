"""Faults of a mixture of experts: in what a router chooses, what travels to the experts, and their
gradients.

What they have in common: a router's choices, and the rows of each expert, are different in every
step, so no shape and no number of a log is known beforehand. The loss of a small model of new
weights hardly depends on its experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.mesh import Mesh
from titanlite.model import moe
from titanlite.model.moe import Experts, multiply
from titanlite.parallel import expert_parallel
from titanlite.tools.faults.fault import Fault, replaced

MIXTURE = (
    "model.num_experts=4,model.experts_per_token=2,model.expert_ffn_dim=64,"
    "loss.router_aux_loss=0.03"
)


def balance_per_rank() -> AbstractContextManager[None]:
    def own_tokens(mesh: Mesh, values: Tensor) -> Tensor:
        return values * mesh.data_size  # the shares of this rank's tokens, not of all tokens

    return replaced(Mesh, "sum_tokens", own_tokens)


def expert_gradients_averaged() -> AbstractContextManager[None]:
    def averaged(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient / dist.get_world_size())
        return multiply(rows, weight, ends)

    return replaced(expert_parallel, "multiply", averaged)


def combined_by_expert() -> AbstractContextManager[None]:
    def keep_order(rows: Tensor, order: Tensor) -> Tensor:
        return rows  # sorted by expert; the rows came sorted by rank, then by expert

    return replaced(expert_parallel, "restore_order", keep_order)


def rows_dropped() -> AbstractContextManager[None]:
    original = Experts.forward

    def forward(self: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        capacity = 1.25 * len(rows) / len(counts)
        starts = counts.cumsum(dim=0) - counts
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        numbers = torch.arange(len(rows)) - starts[experts]  # of the rows of one expert
        return original(self, rows, counts) * (numbers < capacity)[:, None]

    return replaced(Experts, "forward", forward)


def ties_by_arrival() -> AbstractContextManager[None]:
    def choose(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        num = probabilities.shape[1]
        arrival = torch.arange(len(probabilities))[:, None]
        turn = (torch.arange(num) + arrival) % num  # each token begins with the next expert
        highest, places = probabilities.gather(1, turn).sort(descending=True, stable=True)
        weights = highest[:, :k]
        return weights / weights.sum(dim=1, keepdim=True), turn.gather(1, places[:, :k])

    return replaced(moe, "choose", choose)


EXPERT_FAULTS = (
    Fault(
        "balance-per-rank",
        "The auxiliary loss is computed from the tokens of one rank",
        balance_per_rank,
        layout=f"dp_shard=2,{MIXTURE}",
        check="experts",
        figure="grad_norm",
        step=2,
        unchanged=("gradient",),
        threads=(
            "NVIDIA/Megatron-LM#1498",
            "pytorch/torchtitan#4772",
            "modelscope/ms-swift#6787",
        ),
        why="""The loss that balances a router multiplies two means: how often an expert is chosen,
and how probable it is. A product of means over the tokens of a rank is not that over all tokens,
so each layout trains with another loss, and each rank asks for balance within its own sequences,
where a text about one subject has none. In the first step titanlite takes all counts for equal, so
the loss first adds to the gradients of the second one. The cross entropy does not contain this
loss, and hardly shows it.""",
    ),
    Fault(
        "expert-gradients-averaged",
        "Gradients of experts are averaged over ep",
        expert_gradients_averaged,
        layout=f"dp_shard=2,ep=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=(
            "deepspeedai/DeepSpeed#6546",
            "NVIDIA/Megatron-LM#5956",
            "pytorch/pytorch#160285",
        ),
        why="""An expert computes the tokens of all ranks of ep, so its gradient is already their
sum when no collective has run. The other weights get theirs from an all-reduce. If a program
averages gradients over ranks, or expects an average, experts need a factor of their own, and with
a wrong one the gradients of all experts are ep times too large or too small. A loss curve does not
show a constant factor, because AdamW divides by the size of a gradient.""",
    ),
    Fault(
        "combined-by-expert",
        "Results return to their ranks in the order of experts, not of the rows that were sent",
        combined_by_expert,
        layout=f"dp_shard=2,ep=2,model.num_layers=4,{MIXTURE}",
        check="experts",
        figure="choices",
        step=1,
        threads=("vllm-project/vllm#52639",),
        why="""Rows arrive sorted by the rank that sent them. For the product of each expert they
are sorted again, by expert, and have to be brought back into the order of their arrival before
they return. Without that the sizes are right, and every rank gets results of the right experts,
but for other tokens. Attention and the residual stream carry most of a new model, so the loss
differs in its fifth digit. The routers of the following blocks see it at once: they choose other
experts.""",
    ),
    Fault(
        "rows-dropped",
        "Rows above the capacity of an expert are dropped, and nothing says so",
        rows_dropped,
        layout=f"dp_shard=2,ep=2,model.num_layers=1,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("AI-Hypercomputer/maxtext#5080", "tenstorrent/tt-metal#55490"),
        why="""Buffers of a fixed size need a limit for the rows of an expert. What is above it is
zero in the result, and only the residual stream carries the token on. How many rows are lost
depends on how the batch is divided, so no two layouts train alike. A dropped row changes the loss
of a new model by less than its rounding; the gradients of the experts miss all dropped rows.
titanlite has no such limit.""",
    ),
    Fault(
        "ties-by-arrival",
        "Equally probable experts are chosen in an order that depends on the layout",
        ties_by_arrival,
        layout=f"cp=2,ep=2,{MIXTURE}",
        check="experts",
        figure="choices",
        step=1,
        threads=("pytorch/torchtitan#3600", "vllm-project/vllm#55514"),
        why="""Equal probabilities are rare in fp32 and common in bfloat16, which has 256 values
between one power of two and the next. `torch.topk` promises no order of equals. So kernels,
devices, and parts of a batch may choose differently; even the recomputation of a forward may.
titanlite sorts in a stable way: of equals the expert with the lowest number is chosen. In
`titanlite verify` two experts of each router have equal logits in the first step, so every layout
has to break ties.""",
    ),
)
