"""One optimizer step: what train.py runs, `titanlite verify` compares, and the benchmarks time.

What it is: `optimizer_step` takes this rank's local batches of a step through forward and
backward, clips, updates the weights and clears the gradients. `StepParts` is what it computes with
and what it changes.
Why it is here: a comparison proves the step that it runs. So there is one, and everything that
takes a step calls it.
What it costs: nothing beside the parts, whose files say what each costs. The host waits for no
device, except for the counts of rows that experts of other ranks get (`expert_parallel.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.data.rows import Batch, count_targets, count_tokens
from titanlite.data.to_device import prefetch, to_device
from titanlite.distributed.mesh import Mesh
from titanlite.optim.clip import clip_gradients
from titanlite.optim.ema import WeightEMA
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.router_balance import RouterBalance
from titanlite.optim.schedule import Schedule
from titanlite.optim.stability import Guard
from titanlite.parallel.stages import Stages

if TYPE_CHECKING:
    from titanlite.model.llama import Llama


@dataclass(frozen=True)
class StepParts:
    """The objects that an optimizer step uses and changes. Parts that are off do nothing."""

    device: torch.device
    max_norm: float  # training.max_norm
    agc_factor: float  # limit of each unit's gradient (optim/agc.py); 0: clip by max_norm
    stages: Stages  # forward and backward of this rank's parts of the model
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: LossScale  # for float16
    guard: Guard  # for bad steps
    ema: WeightEMA
    balance: RouterBalance  # of a mixture of experts


def build_step_parts(
    model_parts: list[Llama], config: Config, mesh: Mesh, device: torch.device, compiled: bool
) -> StepParts:
    """Builds what a step needs around the parts of the model, which `build_model_parts` made.

    `compiled`: whether the blocks are compiled.
    """
    optimizer = build_optimizer(model_parts, config.optimizer, config.parallel.optimizer_offload)
    scaler = LossScale(config.training, optimizer, device)
    agc_factor = config.optimizer.agc_factor if config.optimizer.clip == "agc" else 0.0
    return StepParts(
        device=device,
        max_norm=config.training.max_norm,
        agc_factor=agc_factor,
        stages=Stages(model_parts, config, mesh, device, compiled),
        optimizer=optimizer,
        schedule=Schedule(optimizer, config.schedule, config.optimizer.lr, config.training.steps),
        scaler=scaler,
        guard=Guard(config.stability, optimizer, scaler, mesh, device),
        ema=WeightEMA(config.ema, model_parts, optimizer),
        balance=RouterBalance(model_parts, config.loss.router_aux_loss, mesh, device),
    )


class Measures(Protocol):
    """The points of a step at which something can be measured (`probes/probes.py`)."""

    def before_step(self, batches: list[Batch]) -> None:
        """Called first; `batches`: all local batches of the step, where the caller has them."""

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None:
        """Called after the backward of local batch `i`; after the last, gradients are complete."""

    def before_update(self) -> None:
        """Called when gradients are clipped and weights are still those of the step before."""

    def after_update(self) -> None:
        """Called when weights are updated and gradients are not yet cleared."""


class Unmeasured:
    """The `Measures` of a step in which nothing is measured."""

    def before_step(self, batches: list[Batch]) -> None: ...

    def after_backward(self, i: int, num_batches: int, num_targets: Tensor) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...


def no_save() -> None:
    """Does nothing: the `before_update` of a step without a save in progress."""


class StepResult(NamedTuple):
    """Scalars on the device; reading one waits for it."""

    # This rank's part of the mean over the step's targets (Mesh.sum_losses); NaN without targets
    loss: Tensor
    grad_norm: Tensor  # the norm of the whole gradient, before clipping
    num_tokens: Tensor  # over all ranks, int64, without padding
    num_targets: Tensor  # over all ranks, int64
    lr: float


def optimizer_step(
    step: int,
    batches: list[Batch],
    samples: range,
    parts: StepParts,
    measures: Measures,
    before_update: Callable[[], None] = no_save,
) -> StepResult:
    """Takes optimizer step number `step` = 1, 2, ... on this rank's local batches (B, S).

    All ranks call it together. `samples`: the numbers of the samples of all ranks, for messages;
    `before_update`: called when gradients are complete and nothing that a checkpoint holds has been
    changed in place yet.
    """
    stages = parts.stages
    scaler = parts.scaler
    num_batches = len(batches)
    own_counts = torch.stack((count_tokens(batches), count_targets(batches)))
    counts = stages.mesh.sum_counts(to_device(own_counts, parts.device))  # over all ranks
    num_tokens, num_targets = counts
    measures.before_step(batches)
    parts.balance.start_step(num_tokens, scaler.scale)
    loss = torch.zeros((), device=parts.device)
    for i, batch in enumerate(prefetch(batches, parts.device)):
        last_batch = i == num_batches - 1  # after it the gradients of the step are complete
        loss += stages.forward_backward(batch, num_targets, scaler.scale, last_batch)
        measures.after_backward(i, num_batches, num_targets)
    loss = torch.where(num_targets > 0, loss, math.nan)  # a mean over nothing is undefined
    scaler.unscale()
    grad_norm = clip_gradients(
        stages.model_parts, parts.max_norm, parts.device, stages.shared_params, parts.agc_factor
    )
    scaler.judge(grad_norm)  # an overflow withholds the update and halves the scale
    lr = parts.schedule.set_lr(step)
    before_update()
    # May withhold the update of a bad step
    parts.guard.judge(step, samples, loss, grad_norm, num_targets)
    measures.before_update()
    parts.optimizer.step()
    measures.after_update()
    parts.ema.update()
    parts.balance.finish_step()
    parts.optimizer.zero_grad()
    return StepResult(loss, grad_norm, num_tokens, num_targets, lr)
