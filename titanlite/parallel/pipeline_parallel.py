"""Pipeline parallel: consecutive layers form a stage, stages are spread over ranks, microbatches
flow through them.

What it is: a local batch is cut into M microbatches. A stage sends its output (B, S, D) to the next
stage and receives its gradient from there. A schedule gives the order in which a rank computes; all
of them compute the same sum. `torch.distributed.pipelining` has these schedules (v: stages per
rank; bubble: the idle part of the time):

    schedule                 v    bubble
    GPipe                    1    (pp-1) / (M+pp-1): all forwards, then all backwards (arXiv
                                  1811.06965)
    1F1B                     1    the same, but a rank keeps at most pp microbatches' activations
                                  (arXiv 1806.03377)
    Interleaved1F1B          v    (pp-1) / (v M+pp-1), with v times as many messages (arXiv
                                  2104.04473)
    LoopedBFS                v    the same; GPipe's order, repeated for each of the v stages (arXiv
                                  2211.05953)
    InterleavedZeroBubble    v    computes gradients of weights during the bubble (arXiv 2401.10241)
    ZBVZeroBubble            2    the same; stages go down the ranks and up again, so rank 0 has the
                                  first and the last (section 6 of 2401.10241)
    DualPipeV                2    a V that overlaps forwards with backwards (DeepSeek-V3, arXiv
                                  2412.19437); torch runs the two one after the other

Why it is here: it sends the fewest bytes of all axes, so it is the axis to place across nodes.
What it costs: b B S D / (cp tp) bytes per microbatch and stage boundary in each direction, b bytes
per number, and as many buffers of this size as `most_received` says; and the bubble. Weights,
gradients and moments are 1/pp, but FSDP reduces gradients only after the last microbatch and keeps
them unsharded until then: r N / (pp tp) bytes.

Which layers form a stage is computed by `stage_split.py`. A tied embedding is needed by the first
and the last stage: both hold a copy, and the gradients of the copies are summed before the update.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from titanlite.config.schema import Config, ParallelConfig
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.torch_private import pipeline_stage_class
from titanlite.optim.loss import SummedLoss
from titanlite.parallel.deferred_output import WeightHolder
from titanlite.parallel.stage_split import stage_indices, stage_modules
from titanlite.rules.loss_chunks import loss_chunks
from titanlite.runtime.phases import Phase, mark_phase

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

logger = logging.getLogger("titanlite")
T = TypeVar("T")
Schedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti


def split_into_stages(model: Llama, config: ParallelConfig, mesh: DeviceMesh) -> list[Llama]:
    """Returns the stages that this rank of the pp axis holds, each a Llama (on meta) with some of
    the modules.
    """
    rank = mesh.get_local_rank()
    size = mesh.size()
    per_rank = config.stages_per_process
    stages = stage_modules(model.config, size * per_rank, config.stage_starts)
    for i, names in enumerate(stages):
        logger.info(f"stage {i}: {names[0]}" + (f" to {names[-1]}" if names[1:] else ""))
    return [
        _keep_modules(model, stages[i])
        for i in stage_indices(rank, size, per_rank, config.pp_schedule)
    ]


def _keep_modules(model: Llama, names: list[str]) -> Llama:
    """Copies the model with only these modules; an embedding, norm or output of another stage
    becomes Identity.
    """
    part = copy.deepcopy(model)
    for name in list(part.layers):
        if f"layers.{name}" not in names:
            del part.layers[name]
    for name in {"tok_embeddings", "norm", "output"} - set(names):
        if name == "tok_embeddings" and "output" in names and part.config.tied_embeddings:
            # A tied output needs the weight, though the first stage looks tokens up in its own copy
            part.tok_embeddings = WeightHolder(part.tok_embeddings.get_parameter("weight"))
            part.output = type(part.output)(part.tok_embeddings)
        else:
            setattr(part, name, nn.Identity())
    return part


class Microbatches(NamedTuple):
    """The number of microbatches in a local batch, and meta tensors with the shapes of one before
    and after a stage.
    """

    number: int
    tokens: Tensor
    hidden: Tensor
    output: Tensor


def build_pipeline(
    model_parts: list[Llama], loss: SummedLoss, config: Config, mesh: Mesh, device: torch.device
) -> Pipeline:
    """Builds the pipeline of these stages; shapes of microbatches are divided by tp and cp."""
    training = config.training
    parallel = config.parallel
    llama = model_parts[0].config
    size = parallel.pp_microbatch_size
    tp = mesh["tp"].size()
    local_len = training.seq_len // mesh["cp"].size()
    dtype = getattr(torch, training.compute_dtype)

    def example(*shape: int) -> Tensor:
        return torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=True)

    hidden = example(local_len // tp, llama.dim)
    output = example(local_len, llama.vocab_size // tp)
    if loss_chunks(config, llama.vocab_size, mesh.degrees) > 1:
        output = hidden  # the loss computes the projection
    microbatches = Microbatches(
        number=training.local_batch_size // size,
        tokens=torch.empty(size, local_len, dtype=torch.int64, device="meta"),
        hidden=hidden,
        output=output,
    )
    return Pipeline(model_parts, loss, mesh["pp"], device, parallel.pp_schedule, microbatches)


class Pipeline:
    """Runs local batches through the stages of all ranks of the pp axis."""

    def __init__(
        self,
        stages: list[Llama],
        loss: SummedLoss,
        mesh: DeviceMesh,
        device: torch.device,
        schedule: str,
        microbatches: Microbatches,
    ) -> None:
        """`stages` are those of this rank; `loss`: the summed loss of outputs and labels."""
        self.stages = stages
        self.mesh = mesh
        self.device = device
        self.microbatches = microbatches
        self.indices = stage_indices(mesh.get_local_rank(), mesh.size(), len(stages), schedule)
        self.last = mesh.size() * len(stages) - 1  # the index of the last stage of all ranks
        self.loss = loss
        # The loss and the number of targets of the batch that is computed now
        self.current_loss = loss
        self.num_targets = torch.ones((), device=device)

        # Two schedules, because one cannot do both: in torch 2.11 a stage whose first batch is
        # evaluated cannot train (pytorch#162822), and in 2.13 a stage drops accumulated gradients
        # at each change.
        training_stages = self._build_stages()
        for stage in training_stages:
            mark_chunks(stage)
        self.training = self._build_schedule(schedule, training_stages)
        self.evaluation = self._build_schedule(schedule, self._build_stages())

    def _build_stages(self) -> list[PipelineStage]:
        """Builds torch's stages of this rank, with shapes, so that ranks do not exchange them."""
        shapes = self.microbatches
        return [
            pipeline_stage_class()(
                stage,
                index,
                self.last + 1,
                self.device,
                input_args=shapes.tokens if index == 0 else shapes.hidden,
                output_args=shapes.output if index == self.last else shapes.hidden,
                group=self.mesh.get_group(),
            )
            for stage, index in zip(self.stages, self.indices, strict=True)
        ]

    def _build_schedule(self, name: str, stages: list[PipelineStage]) -> Schedule:
        schedule: Callable[..., Schedule] = get_schedule_class(name)
        one_stage = name in ("GPipe", "1F1B")
        # Losses are sums over a global count: gradients must not be divided by the number of
        # microbatches.
        return schedule(
            stages[0] if one_stage else stages,
            n_microbatches=self.microbatches.number,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.current_loss(output, labels) / self.num_targets

    def _run(
        self,
        run: Callable[..., object],
        tokens: Tensor,
        labels: Tensor,
        loss: SummedLoss,
        num_targets: Tensor,
        per_token: dict[str, Tensor],
    ) -> Tensor:
        self.current_loss = loss
        self.num_targets = num_targets
        losses: list[Tensor] = []
        inputs = []
        if 0 in self.indices:
            inputs.append(tokens.contiguous())  # a stage of torch 2.11 checks strides
        target = labels if self.last in self.indices else None
        # These go to every stage, divided into microbatches like the tokens
        run(*inputs, target=target, losses=losses, return_outputs=False, **per_token)
        if not losses:
            return torch.zeros((), device=num_targets.device)
        return torch.stack(losses).sum().detach()

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, num_targets: Tensor, **per_token: Tensor
    ) -> Tensor:
        """Adds to the gradients; returns the loss on the last stage's rank, zero on the others."""
        return self._run(self.training.step, tokens, labels, self.loss, num_targets, per_token)

    def evaluate(
        self, tokens: Tensor, labels: Tensor, loss: SummedLoss, **per_token: Tensor
    ) -> Tensor:
        """Returns the sum of `loss` on the rank with the last stage, zero on the others."""
        one = torch.ones_like(self.num_targets)
        return self._run(self.evaluation.eval, tokens, labels, loss, one, per_token)


def mark_chunks(stage: PipelineStage) -> None:
    """Makes a stage record the start of each microbatch's forward and backward, for hang diagnosis:
    ranks run them in different orders.
    """
    phases = {
        "forward_one_chunk": Phase.FORWARD,
        "backward_one_chunk": Phase.BACKWARD,
        "backward_weight_one_chunk": Phase.BACKWARD,
    }
    for name, phase in phases.items():
        setattr(stage, name, functools.partial(_mark_and_call, phase, getattr(stage, name)))


def _mark_and_call(phase: Phase, method: Callable[..., T], *args: object, **kwargs: object) -> T:
    mark_phase(phase)
    return method(*args, **kwargs)


def shared_params(stages: list[Llama]) -> list[Tensor]:
    """Lists this rank's copies of a tied embedding: one on the first and on the last rank, or both
    on rank 0 if the schedule is a V.
    """
    shared: list[Tensor] = []
    for stage in stages:
        if stage.config.tied_embeddings:  # a stage without either end has no parameter there
            shared += [
                weight for weight in stage.tok_embeddings.parameters() if weight.requires_grad
            ]
    return shared


@torch.no_grad()
def sum_shared_gradients(params: list[Tensor], mesh: DeviceMesh) -> None:
    """Sets the gradient of each copy of a tied embedding to the sum of both copies' gradients."""
    gradients = [param.grad.to_local() for param in params if param.grad is not None]  # type: ignore[attr-defined]
    if len(gradients) == 2:
        gradients[0] += gradients[1]
        gradients[1].copy_(gradients[0])
    elif gradients:
        local = gradients[0].to(mesh.device_type)  # NCCL cannot send from the CPU
        group = mesh.get_group()
        received = torch.empty_like(local)
        # The copies are on the first and the last rank of the axis
        peer = dist.get_global_rank(group, mesh.size() - 1 - mesh.get_local_rank())
        exchange = [
            dist.P2POp(dist.isend, local, peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradients[0] += received.to(gradients[0].device)
