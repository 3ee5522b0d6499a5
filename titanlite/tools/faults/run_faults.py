"""Faults without a figure in `titanlite verify`: after a stop, in the schedule, in validation, and
in files.

They are compared with the losses of an uninterrupted run of one process, or with the logits of the
model that was exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.state import ModelState, OptimizerState
from titanlite.data.stream import TrainStream
from titanlite.observe.validation import Sums, Validator
from titanlite.optim.schedule import Schedule
from titanlite.tools.faults.fault import Fault, replaced
from titanlite.tools.formats import huggingface


def data_begins_again() -> AbstractContextManager[None]:
    return replaced(TrainStream, "load_state_dict", lambda self, state: None)


def data_counted_by_rank() -> AbstractContextManager[None]:
    def state_dict(self: TrainStream) -> dict[str, Tensor]:
        return {"samples": torch.tensor(self.samples // self.data_size)}  # the samples of one rank

    return replaced(TrainStream, "state_dict", state_dict)


@contextlib.contextmanager
def blocks_numbered_in_stage() -> Iterator[None]:
    original = ModelState.state_dict

    def state_dict(self: ModelState) -> dict[str, Tensor]:
        state = original(self)
        first = min(int(name.split(".")[1]) for name in state if name.startswith("layers."))
        return {name.replace(f"layers.{first}.", "layers.0."): state[name] for name in state}

    # A checkpoint is read into the tensors of `state_dict`, so nothing is left to load
    with (
        replaced(ModelState, "state_dict", state_dict),
        replaced(ModelState, "load_state_dict", lambda self, state: None),
    ):
        yield


def moments_not_loaded() -> AbstractContextManager[None]:
    def load_state_dict(self: OptimizerState, state: dict[str, Tensor]) -> None:
        for value in self.state_dict().values():
            value.zero_()  # as in a new optimizer

    return replaced(OptimizerState, "load_state_dict", load_state_dict)


def scheduled_by_microbatch() -> AbstractContextManager[None]:
    original = Schedule.set_lr

    def set_lr(self: Schedule, step: int) -> float:
        return original(self, step * 4)  # a step has four local batches

    return replaced(Schedule, "set_lr", set_lr)


def targets_counted_after_cut() -> AbstractContextManager[None]:
    original = Validator.sums

    def sums(self: Validator, *arguments: Any) -> Sums | None:
        result = original(self, *arguments)
        if result is None:
            return None
        return result._replace(num_targets=result.num_targets // self.mesh["cp"].size())

    return replaced(Validator, "sums", sums)


def rows_not_permuted() -> AbstractContextManager[None]:
    return replaced(huggingface, "is_permuted", lambda name: False)


def only_rank_0_saves_adapters() -> AbstractContextManager[None]:
    original = ModelState.state_dict

    def state_dict(self: ModelState) -> dict[str, Tensor]:
        state = original(self)
        if dist.get_rank() == 0:
            return state
        return {name: torch.zeros_like(value) for name, value in state.items()}

    return replaced(ModelState, "state_dict", state_dict)


RUN_FAULTS = (
    Fault(
        "data-begins-again",
        "A resumed run reads its data from the beginning",
        data_begins_again,
        layout="dp_shard=2",
        check="run",
        resumed="dp_shard=2",
        figure="loss",
        step=4,
        threads=("karpathy/nanoGPT#467",),
        why="""Weights, moments and step number are loaded, but the place in the data is not.
The first step after the stop reads the samples of step 1 again. On real data the loss after a
resume is a little too low, since these samples were seen before, and what is at the end of the
data is never read.""",
    ),
    Fault(
        "data-counted-by-rank",
        "The place in the data is the number of samples that one rank has read",
        data_counted_by_rank,
        layout="dp_shard=2",
        check="run",
        resumed="",
        figure="loss",
        step=4,
        threads=("pytorch/torchtitan#809", "pytorch/torchtitan#811"),
        why="""Each of two ranks has read half of the samples, so a run that goes on with this
number reads the second half of them again, on one rank or on two. A number of all ranks means the
same on any number of them.""",
    ),
    Fault(
        "moments-lost",
        "A resumed run begins with moments of zero",
        moments_not_loaded,
        layout="dp_shard=2",
        check="run",
        resumed="dp_shard=2",
        figure="loss",
        step=5,
        threads=("pytorch/torchtitan#1136",),
        why="""The first loss after the stop, of step 4, is right: weights and data are. AdamW
then takes a step as at the beginning of a run, with averages of one gradient, so the loss differs
from step 5 on. A test that compares one step after a resume does not see it.""",
    ),
    Fault(
        "blocks-from-0",
        "A pipeline stage numbers its blocks from 0 when it restores a checkpoint",
        blocks_numbered_in_stage,
        layout="",
        check="run",
        resumed="pp=2",
        figure="loss",
        step=4,
        threads=("NVIDIA/Megatron-LM#7452",),
        why="""The last stage holds the second block of the model, which is the first of its own. So
it reads the first block of the file, which has the same shapes. No name that a stage asks for is
missing, so the load succeeds. Training goes on with the first block twice. A block's name has to be
its number in the whole model.""",
    ),
    Fault(
        "schedule-by-microbatch",
        "The learning rate is scheduled by local batches",
        scheduled_by_microbatch,
        layout="",
        check="run",
        figure="loss",
        step=2,
        threads=(),
        why="""With four local batches in a step the warmup ends after a quarter of its steps,
and so does the decay. The first loss is of the initial weights; the first update already has four
times its learning rate.""",
    ),
    Fault(
        "validation-count",
        "Validation counts targets after the sequence was cut over context parallel ranks",
        targets_counted_after_cut,
        layout="cp=2",
        check="run",
        figure="validation",
        step=0,
        unchanged=("loss",),
        threads=("pytorch/torchtitan#3257",),
        why="""The losses of all ranks of cp are added, and each rank has a part of the sequence.
Counted after the cut, the targets are those of one rank: with two, the loss on held-out text is
twice what it is. Training is right, and the validation loss falls as it should; only its value is
impossible.""",
    ),
    Fault(
        "rope-rows",
        "An export does not permute the rows of queries and keys",
        rows_not_permuted,
        layout="",
        check="export",
        figure="logits",
        step=0,
        unchanged=("tensors",),
        threads=("pytorch/torchtitan#335", "pytorch/torchtitan#1291", "huggingface/nanotron#241"),
        why="""titanlite rotates neighbouring pairs of a head, as Meta's code does; Hugging
Face's code rotates the first half with the second. So the rows of wq and wk lie in another order
in its files. All shapes are right, the file loads, and a converter that reads its own output
again finds equal bits. The logits differ.""",
    ),
    Fault(
        "adapters-of-rank-0",
        "Only the adapters of rank 0 reach the checkpoint; those of the others are zero there",
        only_rank_0_saves_adapters,
        layout="pp=2",
        check="merge",
        figure="merged",
        step=0,
        unchanged=("loss",),
        threads=("NVIDIA-NeMo/Automodel#3096", "NVIDIA-NeMo/Megatron-Bridge#2240"),
        why="""Rank 0 has the adapters of the first blocks, the other rank those of the last ones,
and the file needs both. Training is right, and the file is complete: it has every name and every
shape. But an adapter whose factors are zero adds nothing, so half of the merged blocks are as they
were before the training. Only the logits of the merged model, beside those of the one that was
trained, show it. Where the factors are missing altogether, titanlite refuses the file.""",
    ),
)
