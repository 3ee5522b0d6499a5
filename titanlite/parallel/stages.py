"""Forward and backward through the parts of the model that this rank holds.

What it is: the two calls of the training loop, `forward_backward` for a local batch and `evaluate`
for a validation batch. Three things are chosen once, from the config: how a batch is sharded over
cp, the loss (which depends on tp and `loss.num_chunks`), and whether the model runs as one part or
as a pipeline of stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.config.schema import Config
from titanlite.data.stream import Batch
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.watchdog import mark_phase
from titanlite.optim.loss import SummedLoss, cross_entropy_sum

Scope = contextlib.AbstractContextManager[Any]


class WholeModel:
    """Runs a model that is not split into pipeline stages."""

    def __init__(self, model: Any, loss: SummedLoss) -> None:
        self.model = model
        self.loss = loss

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, num_targets: Tensor, **packing: Tensor
    ) -> Tensor:
        loss = self.loss(self.model(tokens, **packing), labels) / num_targets
        mark_phase("backward", times_only=True)
        loss.backward()
        return loss.detach()

    def evaluate(self, tokens: Tensor, labels: Tensor, **packing: Tensor) -> Tensor:
        return self.loss(self.model(tokens, **packing), labels)


class Stages:
    """Computes the loss of local batches.

    All ranks along pp, cp and tp are given the same batch. Each computes its part of the loss;
    `Mesh.sum_losses` adds the parts.
    """

    def __init__(
        self, model_parts: list[Any], config: Config, mesh: Mesh, device: torch.device
    ) -> None:
        """`model_parts` are parallelised and have their weights; `config` comes from
        `resolve_dtype`.
        """
        self.model_parts = model_parts
        self.config = config.parallel
        self.mesh = mesh
        # Every rank computes whole sequences
        self.shard_batch: Callable[[Batch], Scope] = contextlib.nullcontext
        if mesh["cp"].size() > 1:
            from titanlite.parallel.context_parallel import BatchSharder

            self.shard_batch = BatchSharder(
                model_parts, mesh["cp"], config.parallel.cp_method, device
            ).shard_batch
        self.loss_scope: Callable[[], Scope] = contextlib.nullcontext
        if mesh["tp"].size() > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            # Within it, log-softmax and its gradient work on a sharded vocabulary
            self.loss_scope = loss_parallel
        self.runner: Any = WholeModel(model_parts[0], _build_loss(model_parts, config, mesh))
        # Parameters that two pipeline stages hold: a tied embedding
        self.shared_params: list[Tensor] = []
        self.sum_shared: Callable[[], None] = lambda: None  # adds up the gradients of their copies
        if mesh["pp"].size() > 1:
            from titanlite.parallel.pipeline_parallel import (
                build_pipeline,
                shared_params,
                sum_shared_gradients,
            )

            self.runner = build_pipeline(model_parts, self.runner.loss, config, mesh, device)
            self.shared_params = shared_params(model_parts)
            self.sum_shared = functools.partial(
                sum_shared_gradients, self.shared_params, mesh["pp"]
            )

    @contextlib.contextmanager
    def _ready(self, batch: Batch) -> Any:
        """The context of a forward and backward; yields this rank's part of the batch.

        The last item, for the model: with `data.document_mask` the positions of this rank's tokens,
        and the number of each token's document in the whole sequences.
        """
        with self.loss_scope(), self.shard_batch(batch) as (tokens, labels, positions):
            packing = {}
            if batch.positions is not None:
                packing = {
                    "positions": positions,
                    "documents": (batch.positions == 0).cumsum(dim=1),
                }
            yield tokens, labels, packing

    def forward_backward(self, batch: Batch, num_targets: Tensor, last: bool = True) -> Tensor:
        """Adds to the gradients; returns this rank's part of the summed loss over the step's global
        target count.

        `last`: no other local batch of this step follows.
        """
        mark_phase("forward and backward", in_step=True)
        for part in self.model_parts:
            # Reduces gradients over ranks now, or accumulates them locally
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(last or self.config.reduce_every_microbatch)
        num_targets = num_targets.clamp(min=1)  # a step may have none; then its loss is 0
        with self._ready(batch) as (tokens, labels, packing):
            loss: Tensor = self.runner.forward_backward(tokens, labels, num_targets, **packing)
        if last:
            self.sum_shared()
        return loss

    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's part of the summed loss of a batch."""
        with torch.no_grad(), self._ready(batch) as (tokens, labels, packing):
            loss: Tensor = self.runner.evaluate(tokens, labels, **packing)
        return loss


def _build_loss(model_parts: list[Any], config: Config, mesh: Mesh) -> SummedLoss:
    """The summed loss of the last part's output and the labels: plain, compiled, or with the
    projection in chunks.
    """
    loss: SummedLoss = cross_entropy_sum
    if mesh["tp"].size() > 1:
        from titanlite.parallel.tensor_parallel import loss_parallel_cross_entropy_sum

        loss = functools.partial(loss_parallel_cross_entropy_sum, mesh=mesh["tp"])
    if config.loss.z_loss:
        from titanlite.optim.z_loss import with_z_loss

        loss = with_z_loss(loss, config.loss.z_loss, mesh["tp"])
    if config.compile.loss:
        # Not dynamic, so a smaller last chunk gets a second graph: torch 2.13 cannot compile a
        # sharded vocabulary for dynamic sizes.
        loss = torch.compile(loss, backend=config.compile.backend, dynamic=False)
    if config.loss.num_chunks > 1 and (
        outputs := [p.output for p in model_parts if hasattr(p.output, "projection")]
    ):
        from titanlite.parallel.chunked_loss import ChunkedLoss

        loss = ChunkedLoss(outputs[0], config.loss.num_chunks, loss, mesh["tp"])
    return loss
