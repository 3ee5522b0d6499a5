"""Step 1: the loop. One process trains a small Llama for 20 optimizer steps.

    python learn/steps/1_loop.py

What is new: everything that a training run computes. Each optimizer step takes a batch, divides it
into local batches that fit in memory, adds up their gradients, limits the norm of the gradients,
sets the learning rate and updates the parameters with AdamW.
What it costs: with N parameters in fp32, 16 N bytes: 4 N of parameters and 8 N of AdamW's two
moments through the whole run, 4 N of gradients from the first backward to the update. The
activations of one local batch come on top; the largest are its logits, 4 S V bytes for each
sequence, and their gradient. No collectives.
Read next: 2_ddp.py, which divides the batch between processes.

Nothing here may depend on how the batch is divided. So the loss is a sum over the labels, divided
by the number of labels of the whole optimizer step: the gradients of the parts then add up to the
gradient of the whole, whatever the parts are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from common import (
    BETAS,
    EPS,
    MAX_NORM,
    STEPS,
    TARGETS,
    WEIGHT_DECAY,
    launch,
    learning_rate,
    read_step,
)
from llama import Llama
from torch import Tensor, nn

LOCAL_B = 2  # sequences of a local batch


class AdamW:
    """AdamW (arXiv 1711.05101): Adam whose weight decay is not part of the gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.mean = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.square = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter by its gradient."""
        beta1, beta2 = BETAS
        self.count += 1
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            assert gradient is not None
            self.mean[i].lerp_(gradient, 1 - beta1)
            self.square[i].lerp_(gradient.square(), 1 - beta2)
            # Both moments began at 0; without this correction the first steps would be too small
            mean = self.mean[i] / (1 - beta1**self.count)
            square = self.square[i] / (1 - beta2**self.count)
            parameter.mul_(1 - lr * WEIGHT_DECAY)
            parameter.sub_(lr * mean / (square.sqrt() + EPS))


@torch.no_grad()
def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients by one factor, so that their common norm is at most `max_norm`.

    Returns the norm before that.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


def train_step(step: int, model: Llama, optimizer: AdamW) -> float:
    """One optimizer step; returns the mean loss over all labels of its batch.

    step: from 1 on, as `read_step` and `learning_rate` count. At most LOCAL_B sequences go through
    the model at once. The loss of a local batch is the sum of its cross entropies divided by
    TARGETS. Afterwards there are no gradients, so that the next step begins from zero.
    """
    # gap: the local batches, the clipping and the update
    tokens, labels = read_step(step)  # (B, S), the whole batch
    loss = 0.0
    for first in range(0, len(tokens), LOCAL_B):
        local_tokens = tokens[first : first + LOCAL_B]
        local_labels = labels[first : first + LOCAL_B]
        logits = model(local_tokens)  # (LOCAL_B, S, V)
        local_loss = F.cross_entropy(
            logits.flatten(0, 1),
            local_labels.flatten(),
            reduction="sum",  # a mean would weigh local batches equally, not labels
        )
        local_loss = local_loss / TARGETS
        local_loss.backward()  # adds to the gradients of the local batches before
        loss += local_loss.item()

    # Only now: the norm of a part of the gradient says nothing about the whole
    clip(optimizer.parameters, MAX_NORM)
    optimizer.step(learning_rate(step))
    for parameter in optimizer.parameters:
        parameter.grad = None  # frees 4 bytes per parameter until the next backward
    return loss
    # end of gap


def train() -> list[float]:
    """The losses of all steps."""
    model = Llama()
    optimizer = AdamW(model.parameters())
    return [train_step(step, model, optimizer) for step in range(1, STEPS + 1)]


if __name__ == "__main__":
    launch(train, processes=1, allowed=(1,))

# With torch, and in titanlite:
#   AdamW       torch.optim.AdamW(fused=True)      titanlite/optim/optimizer.py: build_optimizer
#   clip        torch.nn.utils.clip_grad_norm_     titanlite/optim/clip.py: clip_gradients
#   the loss    F.cross_entropy(reduction="sum")   titanlite/optim/loss.py: cross_entropy_sum
#   the rate    torch.optim.lr_scheduler.LambdaLR  titanlite/optim/schedule.py: lr_factor
#   train_step  no call: the program has the order  train.py: main
