"""Pipeline parallel: the layers are cut into stages, and microbatches flow through them.

What it is: P processes along an axis hold consecutive layers. A batch is cut into M microbatches; a stage sends its
output (B, S, D) to the next one and receives its gradient from there. The schedule says in which order a process
computes: `torch.distributed.pipelining` has them all, and they compute the same sum.

    schedule                 stages per process    bubble, as a part of the time (V stages per process)
    GPipe                    1     (P-1)/(M+P-1): all forwards, then all backwards (arXiv 1811.06965)
    1F1B                     1     the same, but at most P microbatches' activations are kept (arXiv 1806.03377)
    Interleaved1F1B          V     (P-1)/(V M+P-1), V times the messages (arXiv 2104.04473)
    LoopedBFS                V     as GPipe over V rounds (arXiv 2211.05953)
    InterleavedZeroBubble    V     weights' gradients fill the bubble (arXiv 2401.10241)
    ZBVZeroBubble            2     the same in a V: process 0 has the first and the last stage (section 6 there)
    DualPipeV                2     a V that pairs forwards with backwards (DeepSeek-V3, arXiv 2412.19437); torch runs
                                   a pair one after the other

What it costs: a message of b B S D / (cp tp) bytes per microbatch and boundary, each way: the least traffic of all
axes, so it spans nodes. The bubble; and the loss lives on one process only. Weights, gradients and moments are 1/P, but
FSDP sums gradients over processes after the last microbatch only, and until then keeps them whole.

The cut: a block's parameters are its work and its memory; so are the output's. The embedding multiplies nothing, but
takes memory where most activations are kept: half its size counts. The heaviest stage is made as light as possible.

A tied embedding is needed at both ends. Both hold it, and before the update they exchange and add their gradients.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.config.schema import ParallelConfig
from titanlite.distributed.torch_private import pipeline_stage_class

logger = logging.getLogger("titanlite")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stage_indices(rank: int, size: int, per_process: int, schedule: str) -> list[int]:
    """The stages of a process: r, r + P, ... going round, or r and 2P - 1 - r in a V."""
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else list(range(rank, size * per_process, size))


def balanced_split(weights: list[int], num_stages: int) -> list[int]:
    """Where stages begin, as indices into `weights`, so that the heaviest stage is lightest.

    The first and the last weight are the ends, the others blocks; each stage has at least one block. Of equally good
    cuts the one with the lightest last stages, where the loss is computed as well.
    """
    blocks = len(weights) - 2
    total = [0, *itertools.accumulate(weights)]

    def cost(begin: int, end: int) -> int:  # of a stage with blocks begin .. end - 1, and the ends where they belong
        return total[len(weights) if end == blocks else end + 1] - total[0 if begin == 0 else begin + 1]

    best: dict[int, tuple[int, list[int]]] = {end: (cost(0, end), [0]) for end in range(1, blocks + 1)}
    for stage in range(1, num_stages):
        best = {
            end: min((max(best[begin][0], cost(begin, end)), [*best[begin][1], begin]) for begin in range(stage, end))
            for end in range(stage + 1, blocks + 1)
        }
    return [begin + 1 if begin else 0 for begin in best[blocks][1]]


def stage_modules(model: Any, num_stages: int, explicit: list[str]) -> list[list[str]]:
    """The names of each stage's modules. `explicit`: where each stage but the first begins; empty: balanced."""
    layers = [f"layers.{name}" for name in model.layers]
    order = ["tok_embeddings", *layers, "norm", "output"]
    if explicit:
        starts = [0, *(order.index(name) for name in explicit)]
    else:
        block = sum(p.numel() for p in next(iter(model.layers.values())).parameters())
        vocabulary = model.tok_embeddings.weight.numel()
        starts = balanced_split([vocabulary // 2, *[block] * len(layers), vocabulary], num_stages)
    return [order[begin:end] for begin, end in zip(starts, [*starts[1:], len(order)], strict=True)]


def split_into_stages(model: Any, config: ParallelConfig, mesh: DeviceMesh) -> list[Any]:
    """The parts of a model (on meta) that this process of the pp axis holds; the whole where that has one process."""
    rank, size, per_process = mesh.get_local_rank(), mesh.size(), config.stages_per_process
    if size == 1:
        return [model]
    stages = stage_modules(model, size * per_process, config.stage_starts)
    for i, names in enumerate(stages):
        logger.info(f"stage {i}: {names[0]}" + (f" to {names[-1]}" if names[1:] else ""))
    return [_keep_modules(model, stages[i]) for i in stage_indices(rank, size, per_process, config.pp_schedule)]


class TiedWeight(nn.Module):
    """A tied embedding on the last stage, where the output uses its weight: hands on what it is given."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def _keep_modules(model: Any, names: list[str]) -> Any:
    """A copy of the model with only these modules; an end that is missing hands on what it is given."""
    part = copy.deepcopy(model)
    for name in list(part.layers):
        if f"layers.{name}" not in names:
            del part.layers[name]
    for name in {"tok_embeddings", "norm", "output"} - set(names):
        if name == "tok_embeddings" and "output" in names and part.config.tied_embeddings:
            part.tok_embeddings = TiedWeight(part.tok_embeddings.weight)
            part.output = type(part.output)(part.tok_embeddings)
        else:
            setattr(part, name, nn.Identity())
    return part


class Pipeline:
    """Runs batches through the stages of all processes of the pp axis."""

    def __init__(
        self,
        parts: list[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        schedule: str,
        microbatches: int,
        hidden: Tensor,
        output: Tensor,
        tokens: Tensor,
    ) -> None:
        """`hidden`, `output` and `tokens` are examples, on meta, of what a microbatch is between, after and before
        the stages; `loss` gives the summed loss of outputs and labels."""
        numbers = stage_indices(mesh.get_local_rank(), mesh.size(), len(parts), schedule)
        total = mesh.size() * len(parts)
        self.first, self.last = 0 in numbers, total - 1 in numbers
        self.loss, self.num_targets = loss, torch.ones((), device=device)

        def build() -> Any:
            stages = [
                pipeline_stage_class()(
                    part,
                    number,
                    total,
                    device,
                    input_args=tokens if number == 0 else hidden,
                    output_args=output if number == total - 1 else hidden,
                    group=mesh.get_group(),
                )
                for part, number in zip(parts, numbers, strict=True)
            ]
            cls: Any = get_schedule_class(schedule)
            single = schedule in ("GPipe", "1F1B")
            # Losses are sums over a global count: gradients must not be divided by the number of microbatches.
            return cls(
                stages[0] if single else stages, n_microbatches=microbatches, loss_fn=self._loss, scale_grads=False
            )

        # One for each use: a stage whose first batch is evaluated cannot train (2.11), or starts anew and drops the
        # gradients there are (2.13).
        self.training, self.evaluation = build(), build()

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.loss(output, labels) / self.num_targets

    def _run(self, run: Callable[..., Any], tokens: Tensor, labels: Tensor, num_targets: Tensor) -> Tensor:
        self.num_targets = num_targets
        losses: list[Tensor] = []
        # contiguous: a stage of torch 2.11 checks strides
        inputs, target = [tokens.contiguous()] * self.first, labels if self.last else None
        run(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=num_targets.device)

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_targets: Tensor) -> Tensor:
        """Adds to the gradients; the loss on the process with the last stage, zero on the others."""
        return self._run(self.training.step, tokens, labels, num_targets)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss, likewise."""
        return self._run(self.evaluation.eval, tokens, labels, torch.ones_like(self.num_targets))


@torch.no_grad()
def add_tied_gradients(weights: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Gives both ends the sum of their gradients for the weight they share.

    `weights`: this process's copies: one on the first and on the last process, both on one in a V, none between.
    """
    gradients = [weight.grad.to_local() for weight in weights if weight.grad is not None]  # type: ignore[attr-defined]
    if len(gradients) == 2:
        gradients[0] += gradients[1]
        gradients[1].copy_(gradients[0])
    elif gradients:
        rank, size = mesh.get_local_rank(), mesh.size()
        other, group = torch.empty_like(gradients[0]), mesh.get_group()
        peer = dist.get_global_rank(group, size - 1 - rank)
        exchange = [dist.P2POp(dist.isend, gradients[0], peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradients[0] += other
