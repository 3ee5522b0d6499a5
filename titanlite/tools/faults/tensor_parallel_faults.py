"""Faults of tensor parallelism: sums over the tp axis that are missing or made twice.

What most of them have in common: a tensor is declared replicated but holds a term of a sum on each
rank (`Partial`). DTensor trusts the declaration, so it sends nothing and raises nothing.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel

from titanlite.distributed import dtensor
from titanlite.parallel import deferred_output, lora, tensor_parallel
from titanlite.parallel.lora import LoRALinear
from titanlite.parallel.tensor_parallel import SEQUENCE_SHARD, block_plan
from titanlite.tools.faults.fault import Fault, replaced


def norm_gradient_not_reduced() -> AbstractContextManager[None]:
    def local_norm(norm: nn.RMSNorm, mesh: DeviceMesh, x: Tensor) -> DTensor:
        local = x.to_local() if isinstance(x, DTensor) else x  # (B, S/tp, D)
        assert isinstance(norm.weight, DTensor)
        weight = norm.weight.to_local(grad_placements=[Replicate()])  # it is Partial()
        out = F.rms_norm(local, weight.shape, weight, norm.eps)
        return DTensor.from_local(out, mesh, [SEQUENCE_SHARD])

    class LocalGradient(SequenceParallel):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            norm = super()._apply(module, device_mesh)
            assert isinstance(norm, nn.RMSNorm)
            norm.forward = functools.partial(local_norm, norm, device_mesh)  # type: ignore[method-assign]
            return norm

    plan = {**block_plan(qk_norm=False, experts=False), "attention_norm": LocalGradient()}
    return replaced(tensor_parallel, "block_plan", lambda qk_norm, experts: plan)


def partial_sums_not_reduced() -> AbstractContextManager[None]:
    class NotReduced(tensor_parallel.RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(layouts: Any, local: Any, mod: Any, out: Any, mesh: Any) -> Any:
            whole = DTensor.from_local(out.to_local(), mesh, [Replicate()])  # it is Partial()
            return whole.redistribute(placements=[SEQUENCE_SHARD]).to_local()

    plan = block_plan(qk_norm=False, experts=False)
    for name in ("attention.wo", "feed_forward.w2"):
        plan[name] = NotReduced(output_layouts=SEQUENCE_SHARD)
    return replaced(tensor_parallel, "block_plan", lambda qk_norm, experts: plan)


def chunked_gradient_not_reduced() -> AbstractContextManager[None]:
    return replaced(deferred_output, "Partial", Replicate)


def adapter_gradient_not_reduced() -> AbstractContextManager[None]:
    return replaced(lora, "Partial", Replicate)


def adapter_added_by_each_rank() -> AbstractContextManager[None]:
    original = LoRALinear.hidden

    def hidden(self: LoRALinear, x: Tensor, a: Tensor) -> Tensor:
        b = self.lora_b.weight
        times = 1
        if isinstance(b, DTensor) and b.placements[0] == Replicate():  # of a row-parallel layer
            times = b.device_mesh.size()
        return original(self, x, a) * times

    return replaced(LoRALinear, "hidden", hidden)


def replicas_counted_again() -> AbstractContextManager[None]:
    return replaced(dtensor, "num_holders", lambda parameter: 1)


def shards_counted_as_replicas() -> AbstractContextManager[None]:
    return replaced(dtensor, "num_holders", lambda parameter: parameter.device_mesh.size())


TENSOR_PARALLEL_FAULTS = (
    Fault(
        "norm-gradient",
        "The gradient of a norm is not summed over the tensor parallel ranks",
        norm_gradient_not_reduced,
        layout="tp=2",
        figure="gradient",
        step=1,
        unchanged=("loss",),
        threads=("NVIDIA/Megatron-LM#1446", "NVIDIA/Megatron-LM#7452"),
        why="""With sequence parallel each rank normalises its part of the tokens, and all
ranks hold the same weight. So the gradient that a rank computes for it is one term of a sum over
tp. If that sum is left out, each rank updates its copy with the gradient of its own tokens, and
the copies drift apart. Norms are few parameters, so the loss of the first steps does not
differ.""",
    ),
    Fault(
        "partial-sums",
        "The partial results of a row-parallel layer are not summed",
        partial_sums_not_reduced,
        layout="tp=2",
        figure="loss",
        step=1,
        threads=(),
        why="""wo and w2 are cut by input features, so each rank has a partial sum for every
token. Without the sum over ranks each token gets the part of one rank: half of the heads, and
half of the feed-forward network. The loss still falls. Loaded into another program, the weights
compute something else.""",
    ),
    Fault(
        "chunked-loss",
        "A loss in chunks takes each rank's gradient of the hidden states for the whole",
        chunked_gradient_not_reduced,
        layout="tp=2,loss.num_chunks=3",
        figure="gradient",
        step=1,
        threads=("pytorch/torchtitan#2937", "pytorch/torchtitan#3412"),
        why="""Each rank has the logits of its part of the vocabulary, so its gradient of the
hidden states is a term of a sum. Called replicated, it is not summed. The loss itself is computed
before, so the first one is right. torchtitan shipped this for 24 days; comparing tensor parallel
with context parallel and one GPU found it.""",
    ),
    Fault(
        "adapter-gradient",
        "The shared factor of an adapter gets the gradient of one rank",
        adapter_gradient_not_reduced,
        layout="tp=2,lora.rank=4,lora.targets=wq w1",
        figure="gradient",
        step=1,
        unchanged=("loss",),
        threads=("modelscope/mcore-bridge#173", "NVIDIA-NeMo/Megatron-Bridge#5900"),
        why="""Factor A of wq is whole on every rank, and each rank uses it for its own heads. So
a rank's gradient of A is one term of a sum over tp, and so is the gradient that the adapter passes
on to its input. Called replicated, neither is summed, and each rank updates its own copy of A. The
forward is right, and an adapter is small, so the losses of the first steps do not show it.""",
    ),
    Fault(
        "adapter-per-rank",
        "The result of a row-parallel adapter is added once per rank",
        adapter_added_by_each_rank,
        layout="tp=2,lora.rank=4,lora.targets=wq wo w1 w2",
        figure="loss",
        step=1,
        threads=("NVIDIA-NeMo/Megatron-Bridge#5635", "pytorch/torchtitan#4245"),
        why="""What every rank adds before the sum over ranks is in the sum tp times. A bias is
the usual case: it belongs after the sum, or on one rank. Here it is the adapter's result, of wo and
w2. An adapter is small, so the loss differs in its fourth digit only. The adapter trains all the
same, and merged into the weights it computes something else.""",
    ),
    Fault(
        "replicas-in-norm",
        "The gradient norm counts what two ranks hold twice",
        replicas_counted_again,
        layout="tp=2",
        figure="grad_norm",
        step=1,
        unchanged=("loss", "gradient", "parameters"),
        threads=("NVIDIA-NeMo/Megatron-Bridge#5411",),
        why="""Each rank adds the squares of the gradients that it holds, and an all-reduce
adds up the ranks. A norm's weight is on all ranks of tp, so its squares count 1/tp on each.
Without that the norm is too large, and where it is above `max_norm`, clipping is too strong. The
gradients themselves are right.""",
    ),
    Fault(
        "shards-in-norm",
        "The gradient norm takes the shards of tp for replicas",
        shards_counted_as_replicas,
        layout="tp=2",
        figure="grad_norm",
        step=1,
        unchanged=("loss", "gradient", "parameters"),
        threads=("NVIDIA/Megatron-LM#7530",),
        why="""The reverse of `replicas-in-norm`: each rank has other rows or columns of a matrix,
but their squares count 1/tp. The norm is too small, here by nearly sqrt(2). Loss and gradients are
right until a norm above `max_norm` is not clipped.""",
    ),
)
