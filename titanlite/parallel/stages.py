"""Forward and backward through the parts of the model that this rank holds.

What it is: the calls of the training loop, `forward_backward` for a local batch and
`evaluate` for a batch of validation. Three things are chosen once, from the config: how a batch is
sharded over cp, the loss (which depends on tp and `loss.num_chunks`), and whether the model runs as
one part or as a pipeline of stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.config.schema import Config
from titanlite.data.rows import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.optim.loss import SummedLoss, cross_entropy_sum
from titanlite.optim.z_loss import with_z_loss
from titanlite.parallel.context_parallel import BatchSharder
from titanlite.parallel.deferred_output import ChunkedLoss, DeferredOutput
from titanlite.parallel.pipeline_parallel import (
    build_pipeline,
    shared_params,
    sum_shared_gradients,
)
from titanlite.parallel.tensor_parallel import loss_parallel_cross_entropy_sum
from titanlite.rules.compiled import compiles_loss
from titanlite.rules.loss_chunks import loss_chunks
from titanlite.runtime.phases import Phase, mark_phase

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


class Runner(Protocol):
    """Runs one part of a model, or a pipeline of stages.

    `Stages` calls it with this rank's part of a batch.
    """

    loss: SummedLoss

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, num_targets: Tensor, **per_token: Tensor
    ) -> Tensor:
        """Adds the gradients of the summed loss / `num_targets`, and returns this quotient."""

    def evaluate(
        self, tokens: Tensor, labels: Tensor, loss: SummedLoss, **per_token: Tensor
    ) -> Tensor:
        """Returns the sum of `loss`, without gradients."""


class WholeModel:
    """Runs a model that is not split into pipeline stages."""

    def __init__(self, model: Llama, loss: SummedLoss) -> None:
        self.model = model
        self.loss = loss

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, num_targets: Tensor, **per_token: Tensor
    ) -> Tensor:
        loss = self.loss(self.model(tokens, **per_token), labels) / num_targets
        mark_phase(Phase.BACKWARD)
        loss.backward()
        return loss.detach()

    def evaluate(
        self, tokens: Tensor, labels: Tensor, loss: SummedLoss, **per_token: Tensor
    ) -> Tensor:
        return loss(self.model(tokens, **per_token), labels)


class Inputs(NamedTuple):
    """This rank's part of a batch: tokens and labels (B, S/cp), and tensors with more numbers per
    token, which every part of the model gets.

    `per_token` holds
    * `positions` (B, S/cp), with `data.document_mask`: the positions of this rank's tokens;
    * `documents` (B, S), with `data.document_mask` or a window: the number of each token's document
    in the whole sequences. A window without `data.document_mask` counts a sequence as one document;
    * `dropout_keys` (B, S/cp), in training with `lora.dropout`;
    * `padding` (B, S/cp/tp), in training with experts, if the batch has some: that of the positions
    which this rank routes.
    """

    tokens: Tensor
    labels: Tensor
    per_token: dict[str, Tensor]


class Stages:
    """Computes the loss of local batches.

    All ranks along pp, cp and tp are given the same batch. Each computes its part of the loss;
    `Mesh.sum_losses` adds the parts.
    """

    def __init__(
        self,
        model_parts: list[Llama],
        config: Config,
        mesh: Mesh,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        """`model_parts` are parallelised and have their weights. `compiled`: whether their blocks
        are compiled; with `compile.loss = auto` the loss then is too.
        """
        self.model_parts = model_parts
        self.config = config.parallel
        self.mesh = mesh
        # In a pipeline the schedule decides this
        keeps_weights = config.parallel.reshard_after_forward == "never" and mesh["pp"].size() == 1
        self.frees_weights = not keeps_weights  # after the backward of each local batch
        method = config.parallel.cp_method
        self.sharder = BatchSharder(model_parts[0].seq_len, mesh["cp"], method, device)
        self.windowed = any(model_parts[0].windows)  # also by other stages' blocks
        self.routed = model_parts[0].config.num_experts > 0
        self.loss_scope: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if mesh["tp"].size() > 1:
            # In this context, log-softmax and its gradient work on a sharded vocabulary
            self.loss_scope = loss_parallel
        compile_loss = compiles_loss(config.compile, compiled, device.type)
        loss = _build_loss(model_parts, config, mesh, compile_loss)
        self.runner: Runner = WholeModel(model_parts[0], loss)
        # The copies of a tied embedding, which two pipeline stages hold
        self.shared_params: list[Tensor] = []
        if mesh["pp"].size() > 1:
            self.runner = build_pipeline(model_parts, loss, config, mesh, device)
            self.shared_params = shared_params(model_parts)

    def sum_shared(self) -> None:
        """Adds up the gradients of parameters that two pipeline stages hold."""
        if self.shared_params:
            sum_shared_gradients(self.shared_params, self.mesh["pp"])

    def forward_backward(
        self,
        batch: Batch,
        num_targets: Tensor,
        scale: Tensor | float = 1.0,
        last: bool = True,
    ) -> Tensor:
        """Adds to the gradients; returns this rank's part of the summed loss over the step's global
        target count.

        `scale`: the loss scale of float16, which multiplies the gradients; `last`: whether this is
        the last local batch of the step.
        """
        mark_phase(Phase.FORWARD_BACKWARD)
        for part in self.model_parts:
            if isinstance(part, FSDPModule):
                # Reduces gradients over ranks now, or accumulates them locally
                part.set_requires_gradient_sync(last or self.config.reduce_every_microbatch)
                # Frees the gathered weights now, or keeps them for the next local batch
                part.set_reshard_after_backward(last or self.frees_weights)
        # A step may have no targets; then its sum of losses and its gradients are 0. Every layout
        # and stage divides the loss by this number, so dividing the number by the scale multiplies
        # the loss by it.
        divisor = num_targets.clamp(min=1) / scale
        with self.inputs(batch) as (tokens, labels, per_token):
            loss = self.runner.forward_backward(tokens, labels, divisor, **per_token)
        if last:
            self.sum_shared()
        return loss / scale

    def evaluate(self, batch: Batch, loss: SummedLoss | None = None) -> Tensor:
        """Returns this rank's part of the summed loss of a batch, without dropout.

        `loss`: a function of logits and labels in place of the loss. It is called for each chunk or
        microbatch, and what it returns is added up.
        """
        of_output = self.runner.loss
        if loss is not None and isinstance(of_output, ChunkedLoss):
            of_output = of_output.with_loss(loss)
        elif loss is not None:
            of_output = loss
        batch = batch._replace(dropout_keys=None, padding=None)  # only training needs them
        with torch.no_grad(), self.inputs(batch) as (tokens, labels, per_token):
            return self.runner.evaluate(tokens, labels, of_output, **per_token)

    @contextlib.contextmanager
    def inputs(self, batch: Batch) -> Iterator[Inputs]:
        """Yields this rank's part of a batch, in the context that forward and backward need."""
        part = self.sharder.shard_batch(batch)
        with self.loss_scope():
            per_token: dict[str, Tensor] = {}
            if self.windowed:
                per_token["documents"] = torch.zeros_like(batch.tokens)  # (B, S)
            if batch.positions is not None and part.positions is not None:
                per_token["positions"] = part.positions  # (B, S/cp)
                # (B, S): a document starts at position 0
                per_token["documents"] = (batch.positions == 0).cumsum(dim=1)
            if part.dropout_keys is not None:
                per_token["dropout_keys"] = part.dropout_keys  # (B, S/cp)
            if part.padding is not None and self.routed:
                tp = self.mesh["tp"]
                # Between attention layers the sequence is cut over tp
                of_ranks = part.padding.chunk(tp.size(), dim=1)
                per_token["padding"] = of_ranks[tp.get_local_rank()]  # (B, S/cp/tp)
            yield Inputs(part.tokens, part.labels, per_token)


def _build_loss(
    model_parts: list[Llama], config: Config, mesh: Mesh, compile_loss: bool
) -> SummedLoss:
    """Builds the function of the last part's output and the labels that returns the summed loss:
    plain, compiled, or with the projection in chunks.
    """
    loss: SummedLoss = cross_entropy_sum
    if mesh["tp"].size() > 1:
        loss = functools.partial(loss_parallel_cross_entropy_sum, mesh=mesh["tp"])
    if config.loss.z_loss:
        loss = with_z_loss(loss, config.loss.z_loss, mesh["tp"])
    if compile_loss:
        # Not dynamic, so a smaller last block of tokens gets a second graph: torch 2.13 cannot
        # compile a sharded vocabulary for dynamic sizes.
        loss = torch.compile(loss, backend=config.compile.backend, dynamic=False)
    num_chunks = loss_chunks(config, model_parts[0].config.vocab_size, mesh.degrees)
    for part in model_parts:
        if isinstance(part.output, DeferredOutput):  # the part with the output layer, if in chunks
            loss = ChunkedLoss(part.output, num_chunks, loss, mesh["tp"])
    return loss
