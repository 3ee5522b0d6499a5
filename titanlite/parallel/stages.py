"""Forward and backward through the parts of the model that this rank holds.

What it is: the two calls of the training loop, `forward_backward` for a local batch and `evaluate` for a validation
batch. Three things are chosen once, from the config: how a batch is sharded over cp, the loss (which depends on tp
and `loss.num_chunks`), and whether the model runs as one part or as a pipeline of stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.watchdog import mark_phase
from titanlite.optim.loss import SummedLoss, cross_entropy_sum
from titanlite.parallel.fsdp import set_gradient_reduction

Scope = contextlib.AbstractContextManager[Any]


class WholeModel:
    """Runs a model that is not split into pipeline stages."""

    def __init__(self, model: Any, loss: SummedLoss) -> None:
        self.model, self.loss = model, loss

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor) -> Tensor:
        loss = self.loss(self.model(tokens), labels) / num_targets
        loss.backward()
        return loss.detach()

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(tokens), labels)


class Stages:
    """Computes the loss of tokens and labels, both (B, S) and equal on all ranks along pp, cp and tp.

    Each rank computes its part of the loss; `Mesh.sum_losses` adds the parts.
    """

    def __init__(self, model_parts: list[Any], config: Config, mesh: Mesh, device: torch.device) -> None:
        """`model_parts` are parallelised and have their weights; `config` comes from `resolve_auto`."""
        self.model_parts, self.config, self.mesh = model_parts, config.parallel, mesh
        self.shard_batch: Callable[[Tensor, Tensor], Scope] = _whole_batch
        if mesh["cp"].size() > 1:
            from titanlite.parallel.context_parallel import BatchSharder

            self.shard_batch = BatchSharder(model_parts, mesh["cp"], config.parallel.cp_method, device).shard_batch
        self.loss_scope: Callable[[], Scope] = contextlib.nullcontext
        if mesh["tp"].size() > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            self.loss_scope = loss_parallel  # within it, log-softmax and its gradient work on a sharded vocabulary
        self.runner: Any = WholeModel(model_parts[0], _build_loss(model_parts, config, mesh))
        self.shared_params: list[Tensor] = []  # parameters that two pipeline stages hold: a tied embedding
        if mesh["pp"].size() > 1:
            from titanlite.parallel.pipeline_parallel import build_pipeline, shared_params

            self.runner = build_pipeline(model_parts, self.runner.loss, config, mesh, device)
            self.shared_params = shared_params(model_parts)

    @contextlib.contextmanager
    def _ready(self, tokens: Tensor, labels: Tensor) -> Any:
        """The context of a forward and backward; yields this rank's part of the batch."""
        with self.loss_scope(), self.shard_batch(tokens, labels) as part:
            yield part

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor, last: bool = True) -> Tensor:
        """Adds to the gradients; returns this rank's part of the summed loss over the step's global target count.

        `last`: no other local batch of this step follows.
        """
        mark_phase("forward and backward", in_step=True)
        for part in self.model_parts:
            set_gradient_reduction(part, last, self.config)
        with self._ready(tokens, labels) as (x, y):
            loss: Tensor = self.runner.forward_backward(x, y, num_targets)
        if last and self.shared_params:
            from titanlite.parallel.pipeline_parallel import sum_shared_gradients

            sum_shared_gradients(self.shared_params, self.mesh["pp"])
        return loss

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the summed loss of a batch."""
        with torch.no_grad(), self._ready(tokens, labels) as (x, y):
            loss: Tensor = self.runner.evaluate(x, y)
        return loss


def _whole_batch(tokens: Tensor, labels: Tensor) -> Scope:
    """Every rank computes with whole sequences."""
    return contextlib.nullcontext((tokens, labels))


def _build_loss(model_parts: list[Any], config: Config, mesh: Mesh) -> SummedLoss:
    """The summed loss of the last part's output and the labels: plain, compiled, or with the projection in chunks."""
    loss: SummedLoss = cross_entropy_sum
    if mesh["tp"].size() > 1:
        from titanlite.parallel.tensor_parallel import loss_parallel_cross_entropy_sum

        loss = functools.partial(loss_parallel_cross_entropy_sum, mesh=mesh["tp"])
    if config.compile.loss:
        # Not dynamic, so a smaller last chunk gets a second graph: torch 2.13 cannot compile a sharded vocabulary for
        # dynamic sizes.
        loss = torch.compile(loss, backend=config.compile.backend, dynamic=False)
    if config.loss.num_chunks > 1 and (outputs := [p.output for p in model_parts if hasattr(p.output, "projection")]):
        from titanlite.parallel.chunked_loss import ChunkedLoss

        loss = ChunkedLoss(outputs[0], config.loss.num_chunks, loss, mesh["tp"])
    return loss
