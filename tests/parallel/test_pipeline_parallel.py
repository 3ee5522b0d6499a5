"""The pipeline of stages."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from model_builder import EVEN, build_stages

from titanlite.config.schema import PP_SCHEDULES
from titanlite.data.rows import Batch


def train_without_objects(schedules: list[str]) -> list[float]:
    """A validation and a step in each schedule, in which no stage may send an object and each first
    message says no.
    """

    def refuse(*args, **kwargs):
        raise AssertionError("a stage sends or receives a pickled object")

    receive, all_reduce = dist.recv, dist.all_reduce

    def receive_a_zero(tensor, *args, **kwargs):
        receive(tensor, *args, **kwargs)
        tensor.zero_()

    def vote_no(tensor, *args, **kwargs):
        all_reduce(tensor, *args, **kwargs)
        # a vote of torch 2.15; ours are sums of int64 and floating-point numbers
        if tensor.dtype == torch.int32:
            tensor.zero_()

    dist.send_object_list = dist.recv_object_list = refuse
    dist.recv = receive_a_zero
    dist.all_reduce = vote_no
    tokens = torch.randint(104, (4, 17), generator=torch.Generator().manual_seed(1))
    batch, losses = Batch(tokens[:, :-1], tokens[:, 1:]), []
    for schedule, dtype in itertools.product(schedules, ("float32", "bfloat16")):
        layout = {"pp": 2, "pp_schedule": schedule}
        stages = build_stages(layout, llama=EVEN, local_batch_size=4, compute_dtype=dtype)
        losses += [
            float(stages.evaluate(batch)) / 64,
            float(stages.forward_backward(batch, torch.tensor(64))),
        ]
    return losses


@pytest.mark.slow
def test_stages_unpickle_nothing(pool):
    """The shapes of what they send are given to them; no message can make them ask each other for
    objects.
    """
    first, second = pool.run(2, train_without_objects, list(PP_SCHEDULES))
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx(
        [first[-1]] * len(first), rel=1e-2
    )
