"""Faults of data parallelism and gradient accumulation: gradients that are averaged, not reduced
over all ranks, or lost, and initial weights that are not the same on all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.distributed.mesh import Mesh
from titanlite.model.llama import Llama
from titanlite.parallel.stages import Stages
from titanlite.tools.faults.fault import Fault, replaced


def gradients_averaged() -> AbstractContextManager[None]:
    def leave_the_default(self: FSDPModule, factor: float) -> None:
        """FSDP2 divides gradients by the number of ranks unless it is given another divisor."""

    return replaced(FSDPModule, "set_gradient_divide_factor", leave_the_default)


def replicas_not_reduced() -> AbstractContextManager[None]:
    original = Mesh.__getitem__

    def getitem(self: Mesh, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes == ("dp_replicate", "dp_shard_cp"):  # over which FSDP reduces gradients
            axes = "dp_shard_cp"
        return original(self, axes)

    return replaced(Mesh, "__getitem__", getitem)


def weights_by_rank() -> AbstractContextManager[None]:
    original = Llama.init_weights

    def init_weights(self: Llama, seed: int, *arguments: Any) -> None:
        original(self, seed + dist.get_rank(), *arguments)

    return replaced(Llama, "init_weights", init_weights)


def accumulation_lost() -> AbstractContextManager[None]:
    original = Stages.forward_backward

    def forward_backward(self: Stages, *arguments: Any) -> Tensor:
        for part in self.model_parts:
            part.zero_grad()
        return original(self, *arguments)

    return replaced(Stages, "forward_backward", forward_backward)


DATA_PARALLEL_FAULTS = (
    Fault(
        "gradients-averaged",
        "FSDP averages gradients of a loss that is already divided by the global count",
        gradients_averaged,
        layout="dp_shard=2",
        figure="gradient",
        step=1,
        threads=("pytorch/torchtitan#2318",),
        why="""The loss of each rank is its sum over the count of all ranks, so gradients have
to be added. Averaging divides them once more, by the number of ranks: with two, every gradient is
half of what it should be. The loss hardly shows it, because clipping and AdamW both divide a
gradient by its size.""",
    ),
    Fault(
        "replicas-not-reduced",
        "Gradients are not all-reduced over replicas",
        replicas_not_reduced,
        layout="dp_replicate=2",
        figure="gradient",
        step=1,
        threads=("NVIDIA-NeMo/Automodel#3135",),
        why="""Each replica applies the gradient of its own sequences. The first loss is right,
because the weights are still equal. From the first update on the replicas are different models;
the loss that is logged is the mean over them, and a checkpoint holds one of them.""",
    ),
    Fault(
        "weights-by-rank",
        "Every rank draws its initial weights with another seed",
        weights_by_rank,
        layout="dp_replicate=2",
        figure="loss",
        step=1,
        threads=(),
        why="""Replicas must begin equal, and gradients that are summed keep them equal. With
other weights on each rank the summed gradient belongs to no model. Here a parameter is drawn from
its name and one seed, so no broadcast is needed; seeds that depend on the rank are for data.""",
    ),
    Fault(
        "accumulation-lost",
        "Only the last local batch of a step contributes to the gradient",
        accumulation_lost,
        layout="pp=2",
        figure="gradient",
        step=1,
        threads=("NVIDIA-NeMo/Automodel#3530",),
        why="""Gradients of the local batches of a step add up in `.grad`. What clears them
before each local batch, or builds the pipeline again, leaves those of the last one. The loss of
the step is still summed over all of them, so the first loss is right.""",
    ),
)
