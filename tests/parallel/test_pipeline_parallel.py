"""The pipeline of stages."""

from __future__ import annotations

import dataclasses
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from model_builder import EVEN, build_stages, full

from titanlite.config.schema import PP_SCHEDULES, ParallelConfig
from titanlite.data.rows import Batch
from titanlite.distributed.torch_private import pipeline_stage_class
from titanlite.parallel import pipeline_parallel
from titanlite.parallel.stage_split import most_received, stage_indices

EIGHT_LAYERS = dataclasses.replace(EVEN, num_layers=8)


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


def one_step(layout: dict, local_batch_size: int) -> tuple[list[torch.Tensor], int]:
    """A validation, a step, and a validation: losses and gradients, and the most tensors received
    that were alive at once in the step.
    """
    alive: set[int] = set()
    most = 0
    operation = dist.P2POp

    def count(op, tensor, *args, **kwargs):
        nonlocal most
        if op is dist.irecv:
            storage = tensor.untyped_storage()
            alive.add(key := storage.data_ptr())
            weakref.finalize(storage, alive.discard, key)
            most = max(most, len(alive))
        return operation(op, tensor, *args, **kwargs)

    tokens = torch.randint(104, (local_batch_size, 17), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    stages = build_stages(layout, llama=EIGHT_LAYERS, local_batch_size=local_batch_size)
    results = [stages.evaluate(batch)]
    dist.P2POp = count
    try:
        results.append(stages.forward_backward(batch, torch.tensor(tokens.numel())))
    finally:
        dist.P2POp = operation
    results.append(stages.evaluate(batch))
    for part in stages.model_parts:
        results += [parameter.grad for parameter in part.parameters()]
    return [full(result) for result in results], most


def buffers(layout: dict, local_batch_size: int) -> tuple[int, int]:
    """The most received tensors at once in a step, here and in torch's stage of 2.11 to 2.14, whose
    losses and gradients must have the same bits.
    """
    results, most = one_step(layout, local_batch_size)
    with pytest.MonkeyPatch.context() as patch:
        torchs = pipeline_stage_class().__bases__[0]  # without our buffers
        patch.setattr(pipeline_parallel, "pipeline_stage_class", lambda: torchs)
        expected, most_of_torch = one_step(layout, local_batch_size)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return most, most_of_torch


SIXTEEN = 16  # microbatches


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch's stages do it from 2.15 on")
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, {"pp": 2, "pp_split": "layers.1"}),
        *(
            pytest.param(2, {"pp": 2, "pp_schedule": schedule}, marks=pytest.mark.slow)
            for schedule in PP_SCHEDULES
        ),
        pytest.param(2, {"pp": 2, "pp_stages_per_process": 3, "pp_schedule": "Interleaved1F1B"}, marks=pytest.mark.slow),
        *(
            pytest.param(4, layout, marks=pytest.mark.slow)
            for layout in (
                {"pp": 4},
                {"pp": 4, "pp_schedule": "Interleaved1F1B"},
                {"pp": 4, "pp_schedule": "ZBVZeroBubble"},
                {"pp": 2, "tp": 2},
                {"pp": 2, "cp": 2, "pp_schedule": "InterleavedZeroBubble"},
                {"pp": 2, "dp_shard": 2, "pp_schedule": "DualPipeV"},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_stage_holds_only_what_is_under_way(pool, processes, layout):
    """Not a buffer for each microbatch; and losses and gradients do not depend on it."""
    config = ParallelConfig(**layout)
    size, per_rank, schedule = config.pp, config.stages_per_process, config.pp_schedule
    found = pool.run(processes, buffers, layout, SIXTEEN)
    allowed = []
    for rank in range(size):
        indices = stage_indices(rank, size, per_rank, schedule)
        received = [most_received(i, size, per_rank, schedule, SIXTEEN) for i in indices]
        allowed.append(sum(map(sum, received)))
    most = [here for here, _ in found]
    of_torch = [there for _, there in found]
    most = most[:: processes // size]
    assert all(here <= limit for here, limit in zip(most, allowed, strict=True)), (most, allowed)
    assert min(of_torch) >= SIXTEEN - 1  # the measure sees them
    if schedule == "1F1B":
        assert most == allowed
