"""What the steps share besides the model: the data, the learning rate, and how processes start.

What it is: the tokens of 20 optimizer steps, which titanlite's own data stream has chosen
(`make_rows.py` writes `rows.txt`); loss, schedule and update, which step 1 explains; and `launch`,
which starts gloo processes.
Why it is here: after step 1 no step changes these.
What it costs: the start of a process that imports torch, 2 to 4 seconds.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor

STEPS = 20
B = 8  # sequences of an optimizer step, over all ranks
S = 64  # tokens of a sequence
TARGETS = B * S  # labels of an optimizer step, over all ranks
LR = 3e-3
WARMUP = 5
MAX_NORM = 1.0
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
if not hasattr(dist, "all_gather_single"):  # older releases of torch have longer names
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor
ROWS = Path(__file__).with_name("rows.txt")


def read_step(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S) of optimizer step 1 .. STEPS, the whole batch.

    A label is the token after: a line of the file has S + 1 tokens.
    """
    lines = ROWS.read_text().splitlines()[(step - 1) * B : step * B]
    rows = torch.tensor([[int(word) for word in line.split()] for line in lines])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int) -> float:
    """Linear warmup, then a cosine to a tenth of the peak. Steps count from 1."""
    if step <= WARMUP:
        return LR * step / WARMUP  # not 0 at the first step
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The part of the step's mean loss that these labels contribute: their sum / TARGETS."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TARGETS


def build_adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """What step 1 computes by hand; it may be given whole parameters or parts of them."""
    return torch.optim.AdamW(parameters, LR, BETAS, EPS, WEIGHT_DECAY)


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def update(optimizer: torch.optim.AdamW, norm: Tensor, step: int) -> None:
    """Clips to MAX_NORM by the norm of the whole gradient, sets the rate, updates."""
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
        for parameter in group["params"]:
            parameter.grad.mul_(factor)
    optimizer.step()


def launch(train: Callable[[], list[float]], processes: int, allowed: tuple[int, ...]) -> None:
    """Runs `train` on this many processes, or on as many as the first argument says.

    Under torchrun, which has started the processes already, it joins them. Rank 0 prints.
    allowed: the numbers of processes that can divide what the step divides, equally.
    """
    given = os.environ.get("WORLD_SIZE")  # torchrun --nproc-per-node N
    number = given or (sys.argv[1] if len(sys.argv) > 1 else str(processes))
    if number not in map(str, allowed):
        numbers = ", ".join(map(str, allowed))
        raise SystemExit(f"{sys.argv[0]}: {number} processes; this step runs on {numbers}")
    processes = int(number)
    if given:
        _work(int(os.environ["RANK"]), processes, "env://", train)
        return
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        if processes == 1:
            _work(0, 1, where, train)
        else:
            arguments = (processes, where, train)
            torch.multiprocessing.spawn(_work, arguments, nprocs=processes)


def _work(rank: int, world_size: int, where: str, train: Callable[[], list[float]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    losses = train()
    if rank == 0:
        for step, loss in enumerate(losses, start=1):
            print(f"step {step:2}  loss {loss:.6f}")
    dist.barrier()  # no process ends while another may still send to it
    dist.destroy_process_group()
