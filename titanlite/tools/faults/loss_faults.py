"""Faults of the loss: a wrong divisor, wrong labels, or attention to the wrong tokens.

What they have in common: the mean loss of a sequence hardly depends on these mistakes at the start
of a run, when every token is equally likely. So most change the loss in its third or fourth digit,
which no curve shows; `padding-nan` makes it NaN.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.data.rows import IGNORED, Batch
from titanlite.distributed.mesh import Mesh
from titanlite.model import llama
from titanlite.optim import z_loss
from titanlite.parallel import stages
from titanlite.parallel.context_parallel import BatchSharder
from titanlite.parallel.stages import Stages
from titanlite.parallel.tensor_parallel import VOCABULARY_SHARD
from titanlite.tools.faults.fault import Fault, replaced


def rank_means() -> AbstractContextManager[None]:
    def own_count(mesh: Mesh, count: Tensor) -> Tensor:
        return count * mesh.data_size  # the targets of this rank, not the sum over ranks

    return replaced(Mesh, "sum_counts", own_count)


def microbatch_means() -> AbstractContextManager[None]:
    original = Stages.forward_backward

    def forward_backward(
        self: Stages, batch: Batch, num_targets: Tensor, *arguments: Any
    ) -> Tensor:
        own_count = (batch.labels != IGNORED).sum()
        return original(self, batch, own_count * 2, *arguments)  # a step has two local batches

    return replaced(Stages, "forward_backward", forward_backward)


def mean_times_count() -> AbstractContextManager[None]:
    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        mean = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return mean * (labels != IGNORED).sum()

    return replaced(stages, "cross_entropy_sum", cross_entropy)


def document_mask_lost() -> AbstractContextManager[None]:
    original = llama.document_mask

    def mask(documents: Tensor, *bounds: int, **window: int) -> object:
        return original(torch.zeros_like(documents), *bounds, **window)  # all in one document

    return replaced(llama, "document_mask", mask)


def labels_after_cut() -> AbstractContextManager[None]:
    original = BatchSharder.shard_batch

    def shard_batch(self: BatchSharder, batch: Batch) -> Batch:
        part = original(self, batch)
        following = part.tokens.roll(-1, dims=1)  # of the tokens that this rank has
        return part._replace(labels=following.where(part.labels != IGNORED, IGNORED))

    return replaced(BatchSharder, "shard_batch", shard_batch)


def labels_shifted_twice() -> AbstractContextManager[None]:
    original = Stages.forward_backward

    def forward_backward(self: Stages, batch: Batch, *arguments: Any) -> Tensor:
        return original(self, batch._replace(labels=batch.labels.roll(-1, dims=1)), *arguments)

    return replaced(Stages, "forward_backward", forward_backward)


def count_of_part() -> AbstractContextManager[None]:
    original = Stages.forward_backward

    def forward_backward(
        self: Stages, batch: Batch, num_targets: Tensor, *arguments: Any
    ) -> Tensor:
        part = self.sharder.shard_batch(batch)
        own_count = (part.labels != IGNORED).sum() * self.mesh["cp"].size()
        share = own_count / (batch.labels != IGNORED).sum()  # 1 if the parts have equally many
        return original(self, batch, num_targets * share, *arguments)

    return replaced(Stages, "forward_backward", forward_backward)


def logits_gathered_before() -> AbstractContextManager[None]:
    original = stages.loss_parallel_cross_entropy_sum

    def cross_entropy(logits: Tensor, labels: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = DTensor.from_local(logits, mesh, [VOCABULARY_SHARD]).full_tensor()  # (B, S, V)
        return original(whole, labels, mesh)  # takes it for (B, S, V/tp)

    return replaced(stages, "loss_parallel_cross_entropy_sum", cross_entropy)


def partition_of_part() -> AbstractContextManager[None]:
    return replaced(z_loss, "log_partition", lambda logits, mesh: logits.logsumexp(dim=-1))


LOSS_FAULTS = (
    Fault(
        "rank-means",
        "The loss is the mean over ranks of each rank's mean",
        rank_means,
        layout="dp_shard=2",
        figure="loss",
        step=1,
        threads=("pytorch/torchtitan#1842", "pytorch/torchtitan#2206"),
        why="""Each rank divides the sum of its losses by its own number of targets. The mean
of these means is the mean over all targets only if all ranks have equally many. Here labels are
ignored in some sequences, as in prompts or padding, so the targets of one rank weigh more than
those of the other: in the loss, and in every gradient.""",
    ),
    Fault(
        "microbatch-means",
        "Each local batch of a step is divided by its own number of targets",
        microbatch_means,
        layout="",
        figure="loss",
        step=1,
        threads=("ml-explore/mlx-lm#1413",),
        why="""The same mistake without a second process: gradient accumulation that adds up
mean losses. With the division by the count of the whole step, one large batch and several small
ones give the same gradient.""",
    ),
    Fault(
        "padding-nan",
        "A part of the batch that has only padding makes the loss NaN",
        mean_times_count,
        layout="dp_shard=2,loss.num_chunks=16",
        figure="loss",
        step=1,
        unchanged=("gradient", "grad_norm", "parameters"),
        threads=("NVIDIA/Megatron-LM#1764",),
        why="""The mean of no numbers is 0 / 0, which is NaN, and NaN times a count of 0 is
NaN. Any part of a batch may be without targets: a chunk of the loss, the part of a context
parallel rank, the last batch of validation. A sum over these tokens is 0, and needs no special
case. Here the gradient of the empty mean is 0, so only the loss is NaN; in other code the weights
are too.""",
    ),
    Fault(
        "document-mask-lost",
        "Documents that are packed into one sequence see each other",
        document_mask_lost,
        layout="dp_shard=2,data.document_mask",
        figure="loss",
        step=1,
        threads=("meta-pytorch/torchforge#546", "huggingface/transformers#46634"),
        why="""Positions begin anew in each document, and labels are right, but attention is
only causal: a token also attends to the documents before its own. Only the first document of each
sequence is computed correctly. The run still learns, although the text before a document has
nothing to do with it.""",
    ),
    Fault(
        "labels-after-cut",
        "Labels are shifted after the sequence was cut over context parallel ranks",
        labels_after_cut,
        layout="cp=2",
        figure="loss",
        step=1,
        threads=(),
        why="""The label of a token is the token after it. For the last token of a chunk that
token can be on another rank, so a rank that shifts its own tokens puts a wrong label there. At most
one label per chunk is wrong, and the loss differs little. The remedy is to shift the labels before
the cut.""",
    ),
    Fault(
        "labels-shifted-twice",
        "Labels are shifted by the data loader and once more by the loss",
        labels_shifted_twice,
        layout="",
        figure="loss",
        step=1,
        threads=(),
        why="""The model learns to predict the token after the next one. The loss falls, but to
a higher level, and text sampled from the model is nonsense. No figure of the run is impossible:
only a second implementation that computes the loss from the tokens shows the fault.""",
    ),
    Fault(
        "count-of-part",
        "Each context parallel rank divides by the targets of its part, times cp",
        count_of_part,
        layout="cp=2",
        figure="loss",
        step=1,
        threads=("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7513"),
        why="""The mean of means again, within a sequence: prompts are at its beginning and padding
at its end, so its parts have different numbers of targets. The number of the whole sequence,
counted before the cut, is the same on all ranks of cp.""",
    ),
    Fault(
        "logits-gathered",
        "A loss that expects a part of the vocabulary gets the gathered logits",
        logits_gathered_before,
        layout="tp=2",
        figure="loss",
        step=1,
        threads=("NVIDIA/Megatron-LM#7452",),
        why="""The parallel loss adds up exp(logit) over the parts of all ranks. If each part is the
whole vocabulary, the sum is tp times too large, and the loss ln(tp) too high. Gradients are wrong
too: each probability is divided by tp, and only the first rank finds labels in its part.""",
    ),
    Fault(
        "z-loss-of-part",
        "The z-loss takes each rank's part of the vocabulary for the whole",
        partition_of_part,
        layout="tp=2,loss.z_loss=0.001",
        figure="loss",
        step=1,
        threads=("NVIDIA/Megatron-LM#737", "NVIDIA/Megatron-LM#7464"),
        why="""A sum over the vocabulary has to be summed over tp as well. ln(Z) of a part is too
small and differs between ranks, so each rank trains with another loss. The threads are about label
smoothing, which made the same mistake in another term.""",
    ),
)
