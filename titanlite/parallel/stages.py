"""Forward and backward through the parts of the model that this process holds.

What it is: the two calls the training loop makes, `forward_backward` for a local batch and `evaluate` for a
validation batch, and what must happen to gradients before the update. Without pipeline parallel there is one part,
the whole model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.distributed.mesh import Mesh
from titanlite.optim.loss import cross_entropy_sum
from titanlite.parallel.attention import preferred_attention
from titanlite.parallel.chunked_loss import ChunkedLoss, DeferredOutput
from titanlite.parallel.context_parallel import BatchSharder
from titanlite.parallel.fsdp import set_gradient_reduction
from titanlite.parallel.parallelize import compute_dtypes, require_inductor
from titanlite.parallel.pipeline_parallel import Pipeline, add_tied_gradients
from titanlite.parallel.tensor_parallel import loss_context, loss_parallel_cross_entropy_sum


class SingleStage:
    """All layers in one process."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.model, self.loss = model, loss

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor) -> Tensor:
        loss = self.loss(self.model(tokens), labels) / num_targets
        loss.backward()
        return loss.detach()

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(tokens), labels)


class Stages:
    """What computes a loss from a batch of tokens and labels, both (B, S), the same on all of pp, cp and tp.

    A loss is this process's part: the sum over `LOSS_AXES` is the whole.
    """

    def __init__(self, parts: list[Any], config: Config, mesh: Mesh, device: torch.device) -> None:
        """`parts` are parallelised and have their weights."""
        self.parts, self.parallel, self.mesh = parts, config.parallel, mesh
        self.sequences = BatchSharder(parts, mesh["cp"], config.parallel.cp_method, device)
        loss: Any = cross_entropy_sum
        if mesh["tp"].size() > 1:
            loss = functools.partial(loss_parallel_cross_entropy_sum, mesh=mesh["tp"])
        if config.compile.loss and config.compile.backend == "inductor":
            require_inductor("compile.loss = true", "compile.loss = false", device.type)
        if config.compile.loss:
            # The last chunk may be smaller: two graphs, where one for any size cannot be made of a cut vocabulary.
            loss = torch.compile(loss, backend=config.compile.backend, dynamic=False)
        for part in parts:
            if isinstance(part.output, DeferredOutput):
                loss = ChunkedLoss(part.output, config.loss.num_chunks, loss, mesh["tp"])
        self.runner: SingleStage | Pipeline
        if mesh["pp"].size() == 1:
            self.runner = SingleStage(parts[0], loss)
        else:
            self.runner = self._pipeline(loss, config, device)
        tied = parts[0].config.tied_embeddings and mesh["pp"].size() > 1
        # Both ends of a pipeline hold a tied embedding: parameters that count twice.
        self.held_twice = [
            part.tok_embeddings.weight for part in parts if tied and hasattr(part.tok_embeddings, "weight")
        ]

    def _pipeline(self, loss: Any, config: Config, device: torch.device) -> Pipeline:
        training, parallel, llama = config.training, config.parallel, self.parts[0].config
        here, tp, size = len(self.sequences.here), self.mesh["tp"].size(), parallel.pp_microbatch_size
        compute, _ = compute_dtypes(config, llama.dim, device.type)

        def example(*shape: int) -> Tensor:
            return torch.empty(size, *shape, dtype=compute, device="meta", requires_grad=True)

        hidden = example(here // tp, llama.dim)
        return Pipeline(
            self.parts,
            loss,
            self.mesh["pp"],
            device,
            schedule=parallel.pp_schedule,
            microbatches=training.local_batch_size // size,
            hidden=hidden,
            output=hidden if config.loss.num_chunks > 1 else example(here, llama.vocab_size // tp),
            tokens=torch.empty(size, here, dtype=torch.int64, device="meta"),
        )

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with preferred_attention(self.mesh.device_type), loss_context(self.mesh["tp"]):
            yield

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor, last: bool = True) -> Tensor:
        """Adds to the gradients; returns this part of the summed loss over the step's global target count.

        `last`: no other batch of this step follows.
        """
        for part in self.parts:
            set_gradient_reduction(part, last, self.parallel)
        with self._computing(), self.sequences.cut(tokens, labels) as (x, y):
            loss = self.runner.forward_backward(x, y, num_targets)
        if last:
            add_tied_gradients(self.held_twice, self.mesh["pp"])
        return loss

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """This part of the summed loss of a batch."""
        with torch.no_grad(), self._computing(), self.sequences.cut(tokens, labels) as (x, y):
            return self.runner.evaluate(x, y)
