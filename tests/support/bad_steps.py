"""Makes steps of a real run not finite, on one rank."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.data.order import Samples
from titanlite.data.stream import TrainStream
from titanlite.parallel.stages import Stages


@contextlib.contextmanager
def nan_with(sample: int, victim: int, where: str):
    """Within it, rank `victim` gets a loss or a gradient of NaN in each step in which it reads this
    sample.

    Yields the sample numbers that this rank has read.
    """
    pick, next_step, forward_backward = Samples.pick, TrainStream.next_step, Stages.forward_backward
    seen: list[int] = []
    begin = [0]

    def noted(order, number):
        seen.append(number)
        return pick(order, number)

    def begun(stream):
        begin[0] = len(seen)
        return next_step(stream)

    def spoiled(stages, batch, num_targets, scale, last):
        loss = forward_backward(stages, batch, num_targets, scale, last)
        if not last or dist.get_rank() != victim or sample not in seen[begin[0] :]:
            return loss
        if where == "loss":
            return loss * float("nan")
        parameter = next(p for part in stages.model_parts for p in part.parameters())
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        grad.view(-1)[:1] = float("inf")
        return loss

    with (
        mock.patch.object(Samples, "pick", noted),
        mock.patch.object(TrainStream, "next_step", begun),
        mock.patch.object(Stages, "forward_backward", spoiled),
    ):
        yield seen
