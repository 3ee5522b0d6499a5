"""Faults of context parallelism: wrong tokens of a rank, wrong positions, and gradients of keys
without the queries of other ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.parallel import context_parallel, parallelize
from titanlite.parallel.context_parallel import apply_cp, local_positions
from titanlite.tools.faults.fault import Fault, replaced


def keys_in_wrong_order() -> AbstractContextManager[None]:
    def contiguous(seq_len: int, mesh: DeviceMesh, method: str) -> Tensor:
        return local_positions(seq_len, mesh, "ulysses")  # not one chunk of each half

    return replaced(context_parallel, "local_positions", contiguous)


def first_positions() -> AbstractContextManager[None]:
    def apply(model: Llama, mesh: DeviceMesh, method: str) -> None:
        apply_cp(model, mesh, method)
        model.positions = torch.arange(model.seq_len // mesh.size())

    return replaced(parallelize, "apply_cp", apply)


def key_gradients_not_reduced() -> AbstractContextManager[None]:
    return replaced(context_parallel, "Partial", Replicate)


def gradients_not_summed_over_cp() -> AbstractContextManager[None]:
    original = Mesh.__getitem__

    def getitem(self: Mesh, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes == "dp_shard_cp":  # over which FSDP reduces gradients
            axes = "dp_shard"
        return original(self, axes)

    return replaced(Mesh, "__getitem__", getitem)


CONTEXT_PARALLEL_FAULTS = (
    Fault(
        "cp-order",
        "Gathered keys are not in the order of the sequence",
        keys_in_wrong_order,
        layout="cp=2,model.num_layers=4",  # with 2 layers the first loss hardly differs
        figure="loss",
        step=1,
        threads=("pytorch/torchtitan#3206",),
        why="""The sequence is cut into one contiguous part per rank, while attention expects a
chunk of the first half and one of the second half on each. So keys are put together in a wrong
order, under a causal mask for the right one: some queries see later tokens, and miss earlier
ones. Every shape is right.""",
    ),
    Fault(
        "cp-positions",
        "Every context parallel rank computes RoPE for the first positions",
        first_positions,
        layout="cp=2",
        figure="gradient",
        step=1,
        unchanged=("loss",),
        threads=("pytorch/torchtitan#2780",),
        why="""A rank's row 0 is not position 0 of the sequence, unless it is the first rank.
With the first positions on every rank, distances between tokens of different chunks are wrong.
New weights attend to all tokens nearly alike, so the loss of the first steps hardly depends on
positions. The gradients of wq and wk do.""",
    ),
    Fault(
        "cp-key-gradient",
        "Keys and values get the gradient of one rank's queries",
        key_gradients_not_reduced,
        layout="cp=2",
        figure="gradient",
        step=1,
        threads=("NVIDIA/Megatron-LM#1464",),
        why="""All ranks use the gathered keys and values, each for its own queries. The
gradient of a key is the sum over the ranks; the backward of the all-gather is a reduce-scatter.
Without the sum, wk and wv get a part of their gradient. The forward is right, so the first loss
is too.""",
    ),
    Fault(
        "cp-not-summed",
        "Weight gradients are reduced over dp_shard, and not over cp",
        gradients_not_summed_over_cp,
        layout="cp=2",
        figure="gradient",
        step=1,
        threads=("NVIDIA-NeMo/Automodel#3414",),
        why="""Context parallel ranks compute with the same weights on different tokens, as
data parallel ranks do. So a weight's gradient is the sum over both axes. Reduced over dp_shard
alone, each cp rank updates its own copy of the weights with the gradient of its own tokens.""",
    ),
)
