"""Step 2: data parallel (DDP). Each process trains on a part of the batch.

    python learn/steps/2_ddp.py 2
    torchrun --nproc-per-node 2 learn/steps/2_ddp.py

What is new: every rank has the whole model and computes gradients from its own sequences. Their sum
over the ranks is the gradient of the whole batch; after that all ranks make the same update.
Gradients are views of a few flat tensors, the buckets. When the backward has completed the last
gradient of a bucket, its all-reduce starts, and runs while the backward computes the next bucket.
What it costs: memory as on one process, 16 N bytes, but each rank has 1/n of the activations. An
all-reduce of 4 N bytes per optimizer step; a ring sends 2 (n - 1) / n times that from each rank.
Read next: 3_zero1.py, which divides AdamW's moments between the ranks.

The gradients are summed, not averaged: each loss is divided by the labels of *all* ranks already.
All ranks draw the same initial weights, so nothing is sent at the start.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from common import STEPS, B, build_adamw, launch, read_step, summed_loss, update
from llama import Llama
from torch import Tensor, nn

LOCAL_B = 2  # sequences of a local batch
BUCKET_BYTES = 256 * 1024  # torch's DDP: 25 MiB


class DDP:
    """Sums the gradients of a model over all ranks during the backward."""

    def __init__(self, model: nn.Module) -> None:
        """Divides the parameters into buckets, the last parameters of the model first.

        The backward completes gradients in about that order.
        """
        self.buckets: list[Tensor] = []  # flat gradients
        self.members: list[list[nn.Parameter]] = [[]]  # of each bucket
        self.last_batch = False  # whether the gradients are complete after this backward
        self.missing: list[int] = []  # of each bucket, in this step
        self.works: list[dist.Work] = []  # all-reduces that have started
        for parameter in reversed(list(model.parameters())):
            held = sum(4 * member.numel() for member in self.members[-1])
            if held and held + 4 * parameter.numel() > BUCKET_BYTES:
                self.members.append([])
            self.members[-1].append(parameter)
            number = len(self.members) - 1
            parameter.register_post_accumulate_grad_hook(partial(self.completed, number))

    def start_step(self) -> None:
        """Before the first backward of an optimizer step: every gradient becomes a view of zeros.

        One flat tensor per bucket goes to `self.buckets`; a parameter's gradient has the
        parameter's shape and shares its memory with the bucket.
        """
        # gap: buckets, and their all-reduces
        self.buckets = []
        self.works = []
        self.missing = [len(members) for members in self.members]
        for members in self.members:
            bucket = torch.zeros(sum(member.numel() for member in members))
            self.buckets.append(bucket)
            pieces = bucket.split([member.numel() for member in members])
            for member, piece in zip(members, pieces, strict=True):
                member.grad = piece.view_as(member)

    def completed(self, number: int, parameter: Tensor) -> None:
        """Autograd has just added to the gradient of a parameter in bucket `number`.

        After the last one of the bucket, and only in the last local batch of the step, starts the
        bucket's all-reduce without waiting for it.
        """
        if not self.last_batch:
            return
        self.missing[number] -= 1
        if self.missing[number] == 0:
            work = dist.all_reduce(self.buckets[number], async_op=True)
            assert work is not None
            self.works.append(work)

    def finish_step(self) -> None:
        """After the last backward: waits until all buckets are sums over the ranks."""
        assert len(self.works) == len(self.buckets)
        for work in self.works:
            work.wait()
        # end of gap


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    rank = dist.get_rank()
    local = B // dist.get_world_size()  # sequences of this rank
    model = Llama()
    optimizer = build_adamw(model.parameters())
    ddp = DDP(model)
    losses = []
    for step in range(1, STEPS + 1):
        tokens, labels = (rows[rank * local : (rank + 1) * local] for rows in read_step(step))
        loss = torch.zeros(())
        ddp.start_step()
        for first in range(0, local, LOCAL_B):
            part = slice(first, first + LOCAL_B)
            ddp.last_batch = first + LOCAL_B >= local
            local_loss = summed_loss(model(tokens[part]), labels[part])
            local_loss.backward()
            loss += local_loss.detach()
        ddp.finish_step()
        # Every rank has the whole gradient, so the norm needs no collective
        norm = torch.cat(ddp.buckets).norm()
        update(optimizer, norm, step)
        dist.all_reduce(loss)  # each rank has the part of its own labels
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   DDP         torch.nn.parallel.DistributedDataParallel, which averages. titanlite uses
#               fully_shard for dp_replicate too    titanlite/parallel/fsdp.py: apply_fsdp
#   the sum     set_gradient_divide_factor(1.0)     titanlite/parallel/fsdp.py: apply_fsdp
#   last_batch  set_requires_gradient_sync          titanlite/parallel/stages.py: forward_backward
