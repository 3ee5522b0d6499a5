"""Direct preference optimization (DPO, arXiv 2305.18290): learns which of two answers is preferred.

What it is: with log p(y) the sum of the log-probabilities of an answer's tokens, and q those of the
reference, which is the model as it was before, the loss of a pair is

    -ln sigmoid(m),    m = r(chosen) - r(rejected),    r(y) = beta (log p(y) - log q(y))

r is called the reward of an answer, and m the margin of a pair. The loss of a step is the mean over
the pairs of all ranks. With adapters (`lora.rank` > 0) the reference is the model without them;
else it is a second model, whose weights are those of `checkpoint.initial_load` and stay so.

How it is computed in any layout: the tokens of an answer may be divided over cp, and only the last
pipeline stage has their log-probabilities. But the gradient of the loss is a weighted sum of the
gradients of tokens: the weight of -log p is beta sigmoid(-m) in the chosen answer, and minus that
in the rejected one. So a local batch takes three passes. The first two compute log p and log q of
its answers without gradients, added up over cp and pp. The third is the usual forward and backward,
with a weighted cross entropy. Labels have the number of their answer (`data/pairs.py`), and are
divided over cp, microbatches and chunks as always.
What it costs: two forwards more, of 2 FLOPs per parameter and token each, beside the 4 of a step
with adapters or the 6 of one without. A second model is sharded as the first one is, and has no
gradients and no moments: 4 bytes per parameter in fp32. For each of the first two passes an
all-reduce of 8 B S bytes over cp and one over pp.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config
from titanlite.data.pairs import (
    are_complete,
    count_pairs,
    number_answers,
    pairs_of_rows,
    split_labels,
)
from titanlite.data.stream import Batch
from titanlite.distributed.mesh import Mesh, sum_dtype
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.lora import without_adapters
from titanlite.parallel.parallelize import build_model_parts
from titanlite.parallel.stages import Stages
from titanlite.parallel.tensor_parallel import VOCABULARY_SHARD


def build_frozen_copy(
    llama: LlamaConfig, config: Config, mesh: Mesh, device: torch.device, compiled: bool
) -> list[Llama]:
    """This rank's parts of the reference of DPO, in the layout of the model. Their weights are
    those of a new model, until those of `checkpoint.initial_load` are read.

    No parts, if there is no DPO or the reference is the model without its adapters.
    """
    if not config.has_frozen_copy:
        return []
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    return build_model_parts(model, all_frozen(config), mesh, device, compiled)


def all_frozen(config: Config) -> Config:
    """The config of a model that is not trained."""
    training = dataclasses.replace(config.training, frozen="*")
    return dataclasses.replace(config, training=training)


def build_stages(
    model_parts: list[Llama],
    config: Config,
    mesh: Mesh,
    device: torch.device,
    compiled: bool = False,
    frozen_copy: Sequence[Llama] = (),
) -> Stages:
    """What computes the loss: of tokens, or with `dpo.beta` of pairs.

    `frozen_copy`: what `build_frozen_copy` made.
    """
    if config.dpo.beta > 0:
        return PairStages(model_parts, config, mesh, device, compiled, frozen_copy)
    return Stages(model_parts, config, mesh, device, compiled)


class PairStages(Stages):
    """Computes the loss of local batches of pairs. Batches have positions, as all with documents.

    `num_targets` of its calls is a number of pairs.
    """

    def __init__(
        self,
        model_parts: list[Llama],
        config: Config,
        mesh: Mesh,
        device: torch.device,
        compiled: bool = False,
        frozen_copy: Sequence[Llama] = (),
    ) -> None:
        super().__init__(model_parts, config, mesh, device, compiled)
        assert bool(frozen_copy) == config.has_frozen_copy
        self.frozen_copy: Stages | None = None
        if frozen_copy:
            self.frozen_copy = Stages(list(frozen_copy), config, mesh, device, compiled)
        self.beta = config.dpo.beta
        # Of a pipeline and of cp, one rank reports the loss, which all know
        self.reports = mesh["pp"].get_local_rank() == 0 and mesh["cp"].get_local_rank() == 0
        # Pairs, those with the chosen answer ahead, and the sum of their margins
        self.trained = torch.zeros(3, device=device)
        self.validated = torch.zeros(3, device=device)

    def count_targets(self, batches: list[Batch]) -> Tensor:
        return count_pairs(batches)

    def forward_backward(
        self,
        batch: Batch,
        num_targets: Tensor,
        scale: Tensor | float = 1.0,
        last: bool = True,
    ) -> Tensor:
        # Without dropout, so that the third pass has the gradient of what the first two computed
        batch = number_answers(batch)._replace(dropout_keys=None)
        exists = are_complete(batch)
        margins = self.margins(batch)
        self.trained += self._summary(margins, exists)
        weights = torch.where(exists, self.beta * torch.sigmoid(-margins), 0.0)
        weights = torch.stack((weights, -weights), dim=1).flatten().float()  # of each answer

        def weighted(logits: Tensor, labels: Tensor) -> Tensor:
            losses, numbers = self._token_losses(logits, labels)
            return (weights[numbers] * losses).sum()

        with self.in_place_of_loss(weighted):
            super().forward_backward(batch, num_targets, scale, last)
        return self._loss(margins, exists) / num_targets.clamp(min=1)

    def validation_loss(self, batch: Batch) -> Tensor:
        batch = number_answers(batch)
        exists = are_complete(batch)
        margins = self.margins(batch)
        self.validated += self._summary(margins, exists)
        return self._loss(margins, exists)

    def margins(self, batch: Batch) -> Tensor:
        """The margin of each pair of a batch with numbered answers (B P,), on every rank."""
        model = self.log_probs(self, batch)
        with self.reference() as stages:
            reference = self.log_probs(stages, batch)
        rewards = (self.beta * (model - reference)).unflatten(0, (-1, 2))  # (B P, 2)
        return rewards[:, 0] - rewards[:, 1]

    @contextlib.contextmanager
    def reference(self) -> Iterator[Stages]:
        """Within it, stages that compute with the reference."""
        if self.frozen_copy is None:
            with without_adapters(self.model_parts):
                yield self
            return
        yield self.frozen_copy
        # After a forward some units stay gathered, for a backward that does not come
        for part in self.frozen_copy.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def log_probs(self, stages: Stages, batch: Batch) -> Tensor:
        """The summed log-probability of each answer (2 B P,) by the model of these stages, on every
        rank.

        They are added up in fp64: a margin is a small difference of large sums.
        """
        device = batch.labels.device
        rows, seq_len = batch.labels.shape
        answers = 2 * rows * pairs_of_rows(seq_len)
        result = torch.zeros(answers, dtype=sum_dtype(device), device=device)

        def add(logits: Tensor, labels: Tensor) -> Tensor:
            losses, numbers = self._token_losses(logits, labels)
            result.index_add_(0, numbers, -losses.to(result.dtype))
            return result.new_zeros(())

        with stages.in_place_of_loss(add):
            stages.evaluate(batch)
        for axis in ("pp", "cp"):
            if self.mesh[axis].size() > 1:
                dist.all_reduce(result, group=self.mesh[axis].get_group())
        return result

    def _token_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of each token, 0 where there is no target, and the number of its answer.

        logits (B, S, V/tp), labels (B, S) -> fp32 and int64 (B S,).
        """
        tokens, numbers = split_labels(labels.flatten())
        logits = logits.flatten(0, 1).float()
        if self.mesh["tp"].size() > 1:
            logits = DTensor.from_local(logits, self.mesh["tp"], [VOCABULARY_SHARD])
        losses = F.cross_entropy(logits, tokens, reduction="none")
        if isinstance(losses, DTensor):
            losses = losses.to_local()
        return losses, numbers

    def _loss(self, margins: Tensor, exists: Tensor) -> Tensor:
        """This rank's part of the summed loss."""
        loss = torch.where(exists, F.softplus(-margins), 0.0).sum().float()
        return loss if self.reports else torch.zeros_like(loss)

    def _summary(self, margins: Tensor, exists: Tensor) -> Tensor:
        """This rank's part of the numbers of pairs and of those with the chosen answer ahead, and
        of the sum of margins.
        """
        ahead = exists & (margins > 0)
        sums = torch.stack((exists.sum(), ahead.sum(), torch.where(exists, margins, 0.0).sum()))
        sums = sums.float()
        return sums if self.reports else torch.zeros_like(sums)

    def columns(self) -> dict[str, Any]:
        """Of the steps since the last call, over all ranks, which call it together."""
        columns = self._rates(self.trained)
        self.trained = torch.zeros_like(self.trained)
        return columns

    def validation_columns(self) -> dict[str, float]:
        columns = self._rates(self.validated)
        self.validated = torch.zeros_like(self.validated)
        return columns

    def _rates(self, sums: Tensor) -> dict[str, float]:
        pairs, ahead, margins = self.mesh.sum_losses(sums).tolist()
        return {
            "reward_accuracy": ahead / max(1.0, pairs),  # share with the chosen answer ahead
            "reward_margin": margins / max(1.0, pairs),
        }
