"""Faults of a mixture of experts: in what a router chooses, what travels to the experts, and their
gradients.

What they have in common: a router's choices, and the rows of each expert, are different in every
step, so no shape and no number of a log is known beforehand. The loss of a small model of new
weights hardly depends on its experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed import dtensor, mesh
from titanlite.distributed.mesh import Mesh
from titanlite.model import moe
from titanlite.model.moe import Experts, MixtureOfExperts, multiply
from titanlite.parallel import expert_parallel
from titanlite.parallel.expert_parallel import OnLocalWeight
from titanlite.parallel.stages import Stages
from titanlite.tools.faults.fault import Fault, replaced

EXPERTS = "model.num_experts=4,model.experts_per_token=2,model.expert_ffn_dim=64"
MIXTURE = f"{EXPERTS},loss.router_aux_loss=0.03"


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


def balance_without_tp() -> AbstractContextManager[None]:
    return replaced(mesh, "TOKEN_AXES", ("dp_replicate", "dp_shard", "cp"))


def router_gradient_not_reduced() -> AbstractContextManager[None]:
    original = OnLocalWeight.forward

    def forward(self: Any, x: Tensor, *ends: Tensor) -> Tensor:
        if self.product is not F.linear:
            return original(self, x, *ends)
        return F.linear(x, self.weight.to_local())  # without grad_placements=[Partial()]

    return replaced(OnLocalWeight, "forward", forward)


def expert_gradient_not_reduced() -> AbstractContextManager[None]:
    original = OnLocalWeight.forward

    def forward(self: Any, x: Tensor, *ends: Tensor) -> Tensor:
        if self.product is F.linear:
            return original(self, x, *ends)
        return multiply(x, self.weight.to_local(), *ends)  # without grad_placements

    return replaced(OnLocalWeight, "forward", forward)


def experts_not_reduced_over_replicas() -> AbstractContextManager[None]:
    original = Mesh.__getitem__

    def getitem(self: Mesh, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes == ("dp_replicate", "expert_shard"):  # over which FSDP reduces experts' gradients
            axes = "expert_shard"
        return original(self, axes)

    return replaced(Mesh, "__getitem__", getitem)


def accumulated_gradients_added_again() -> AbstractContextManager[None]:
    original = Stages.forward_backward

    def forward_backward(self: Stages, *arguments: Any) -> Tensor:
        for name, parameter in self.model_parts[0].named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad *= 2
        return original(self, *arguments)

    return replaced(Stages, "forward_backward", forward_backward)


def router_detached() -> AbstractContextManager[None]:
    original = MixtureOfExperts.route

    def route(self: MixtureOfExperts, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, chosen = original(self, x, padding)
        return weights.detach(), chosen  # as after a gather that autograd does not follow

    return replaced(MixtureOfExperts, "route", route)


def experts_counted_as_replicas() -> AbstractContextManager[None]:
    original = dtensor.num_holders

    def num_holders(parameter: Any) -> int:
        holders = original(parameter)
        if "ep" in parameter.device_mesh.mesh_dim_names:
            holders *= parameter.device_mesh["ep"].size()
        return holders

    return replaced(dtensor, "num_holders", num_holders)


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
    Fault(
        "balance-without-tp",
        "The auxiliary loss counts the tokens of one tensor parallel rank",
        balance_without_tp,
        layout=f"tp=2,loss.router_aux_loss=0.06,{EXPERTS}",
        check="experts",
        figure="grad_norm",
        step=2,
        unchanged=("gradient",),
        threads=("NVIDIA/Megatron-LM#5047", "NVIDIA/Megatron-LM#7481"),
        why="""With sequence parallel each rank of tp routes its own tokens, so the counts of
experts have to be summed over tp too, although all its ranks read the same sequences. They are
divided by the number of all tokens, so without that sum every share is tp times too small, and so
is the gradient of the auxiliary loss.""",
    ),
    Fault(
        "router-gradient",
        "The gradient of a router is not summed over the tensor parallel ranks",
        router_gradient_not_reduced,
        layout=f"tp=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("pytorch/torchtitan#2387", "pytorch/torchtitan#4054"),
        why="""Unless `to_local` gets `grad_placements`, the gradient has the placement of the
weight. The weight is replicated, but each rank routes its own tokens, so its gradient is a term of
a sum. Without the sum the copies of the router become different, and so do the choices for equal
tokens.""",
    ),
    Fault(
        "expert-gradient",
        "The gradient of experts is not summed over the tensor parallel ranks",
        expert_gradient_not_reduced,
        layout=f"tp=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("NVIDIA/Megatron-LM#5916",),
        why="""The same mistake as in `router-gradient`, in the weights that are most of a mixture.
The forward is right, and the losses of the first steps hardly depend on experts.""",
    ),
    Fault(
        "expert-replicas",
        "Gradients of experts are not all-reduced over replicas",
        experts_not_reduced_over_replicas,
        layout=f"dp_replicate=2,dp_shard=2,ep=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("NVIDIA/Megatron-LM#5916",),
        why="""Experts have a mesh of their own, because they are divided over other ranks than the
rest of the block. Without dp_replicate it is still a valid mesh, and FSDP reduces over the ranks
that it has. Each replica trains other experts, and a checkpoint holds those of one.""",
    ),
    Fault(
        "expert-accumulation",
        "Gradients of experts that are accumulated so far are added to themselves",
        accumulated_gradients_added_again,
        layout=f"cp=2,ep=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("NVIDIA/Megatron-LM#6660",),
        why="""The program of the thread reduces gradients after each local batch. In a group of one
rank, as experts have if ep = dp_shard x cp, the buffer was also the result, so its content was
added to it again. The first of N local batches counts 2^(N-1) times. Clipping hides the size of the
gradient, but not its direction.""",
    ),
    Fault(
        "router-detached",
        "The loss has no gradient for the router",
        router_detached,
        layout=f"dp_shard=2,ep=2,{MIXTURE}",
        check="experts",
        figure="gradient",
        step=1,
        threads=("NVIDIA-NeMo/Automodel#2995", "NVIDIA-NeMo/Automodel#2092"),
        why="""A router learns through the weights of the experts that it chose. A collective that
autograd does not follow cuts this path. The forward is right, and the rest of the model learns. The
router has no gradient at all, which counts as an infinite difference.""",
    ),
    Fault(
        "experts-in-norm",
        "The gradient norm takes the experts of different ranks for replicas",
        experts_counted_as_replicas,
        layout=f"dp_shard=2,ep=2,{MIXTURE}",
        check="experts",
        figure="grad_norm",
        step=1,
        unchanged=("choices", "loss", "gradient", "parameters"),
        threads=("NVIDIA/Megatron-LM#5916", "NVIDIA-NeMo/Automodel#3816"),
        why="""Each rank of ep has other experts, and the squares of all of them belong to the norm.
Experts are held by other ranks than the rest of a block, so a rule for all parameters is wrong for
some. The norm is too small, so clipping is too weak. No other figure shows it.""",
    ),
)
