"""Step 7: pipeline parallel with the schedule 1F1B. Each rank has some of the blocks.

    python learn/steps/7_pipeline.py 2

What is new: rank r is stage r. It receives activations from the stage before, computes its blocks
and sends the result to the next stage; gradients go the other way. The batch is divided into M
microbatches, so that the stages work at the same time on different ones. In 1F1B a stage begins
with as many forwards as there are stages after it (warmup), then does one forward and one backward
in turns (steady), and ends with the backwards that are left (cooldown).
What it costs: with p stages about 16 N / p bytes. Per boundary and sequence 4 S D bytes each way,
which is little; so this axis may cross nodes. Stages are idle at the start and the end, in all
(p - 1) / (M + p - 1) of the time. Stage r holds the activations of at most p - r microbatches; with
all forwards first (GPipe) it would be all M.
Read next: 8_ring_attention.py, which divides the sequence.

Sends do not wait for the other side: in the steady phase a stage sends an activation while the next
one sends it a gradient, and if both waited to be received, neither would receive.
References: GPipe (arXiv 1811.06965), PipeDream-Flush (arXiv 2006.09503).
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from common import STEPS, S, build_adamw, gradient_of, launch, read_step, summed_loss, update
from llama import LAYERS, D, Llama
from torch import Tensor, nn

LOCAL_B = 2  # sequences of a microbatch


def split(model: Llama, stage: int, stages: int) -> None:
    """Leaves a stage its blocks; embedding and output are on the first and the last stage."""
    first = stage * LAYERS // stages
    after = (stage + 1) * LAYERS // stages
    for i in range(LAYERS):
        if not first <= i < after:
            del model.layers[str(i)]
    if stage > 0:
        model.tok_embeddings = nn.Identity()  # the input is an activation
    if stage < stages - 1:
        model.norm = nn.Identity()
        model.output = nn.Identity()


class Pipeline:
    """The forwards and backwards of this stage in one optimizer step."""

    def __init__(self, model: Llama, tokens: Tensor, labels: Tensor) -> None:
        """tokens and labels (B, S): the first stage reads the tokens, the last one the labels."""
        self.model = model
        self.stage = dist.get_rank()
        self.stages = dist.get_world_size()
        self.tokens = tokens.split(LOCAL_B)
        self.labels = labels.split(LOCAL_B)
        self.started = 0  # microbatches whose forward was done
        self.waiting: deque[tuple[Tensor, Tensor]] = deque()  # input and result of each
        self.sends: list[tuple[dist.Work | None, Tensor]] = []  # with what must not be freed
        self.loss = torch.zeros(())

    def send(self, x: Tensor, stage: int) -> None:
        """Starts to send to a stage, and goes on."""
        self.sends.append((dist.isend(x, stage), x))

    def forward(self) -> None:
        """The forward of the next microbatch; its input and result go to the end of `waiting`.

        The first stage's input are tokens; another one's is received and needs a gradient. The last
        stage's result is the loss, which is added to `loss`; another one's result is sent.
        """
        # gap: the forward and backward of a microbatch, and their order
        x = self.tokens[self.started]
        if self.stage > 0:
            x = torch.empty(LOCAL_B, S, D)
            dist.recv(x, self.stage - 1)
            x.requires_grad_()
        result = self.model(x)
        if self.stage == self.stages - 1:
            result = summed_loss(result, self.labels[self.started])
            self.loss += result.detach()
        else:
            self.send(result.detach(), self.stage + 1)
        self.started += 1
        self.waiting.append((x, result))

    def backward(self) -> None:
        """The backward of the microbatch that has waited longest.

        The gradient of its result is received, except on the last stage; that of its input is sent,
        except on the first one.
        """
        x, result = self.waiting.popleft()
        gradient = None
        if self.stage < self.stages - 1:
            gradient = torch.empty_like(result)
            dist.recv(gradient, self.stage + 1)
        result.backward(gradient)
        if self.stage > 0:
            self.send(gradient_of(x), self.stage - 1)

    def run(self) -> None:
        """All microbatches in the order of 1F1B; afterwards all that was sent has arrived."""
        microbatches = len(self.tokens)
        warmup = min(self.stages - 1 - self.stage, microbatches)
        for _ in range(warmup):
            self.forward()
        for _ in range(microbatches - warmup):  # steady
            self.forward()
            self.backward()
        for _ in range(warmup):  # cooldown
            self.backward()
        # end of gap
        for work, _ in self.sends:
            assert work is not None
            work.wait()


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    model = Llama()
    split(model, dist.get_rank(), dist.get_world_size())
    optimizer = build_adamw(model.parameters())
    losses = []
    for step in range(1, STEPS + 1):
        pipeline = Pipeline(model, *read_step(step))
        pipeline.run()
        square = torch.stack([gradient_of(p).square().sum() for p in model.parameters()]).sum()
        sums = torch.stack((square, pipeline.loss))  # the loss is 0 but on the last stage
        dist.all_reduce(sums)
        update(optimizer, sums[0].sqrt(), step)
        optimizer.zero_grad()
        losses.append(sums[1].item())
    return losses


if __name__ == "__main__":
    launch(train, processes=2, allowed=(1, 2, 3, 4))  # it has 4 blocks

# With torch, and in titanlite:
#   Pipeline  torch.distributed.pipelining.PipelineStage and Schedule1F1B
#             titanlite/parallel/pipeline_parallel.py: Pipeline, build_pipeline
#   split     modules are left out by name
#             titanlite/parallel/pipeline_parallel.py: split_into_stages
