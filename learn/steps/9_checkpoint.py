"""Step 9: a sharded checkpoint, saved by n ranks and loaded by n / 2.

    python learn/steps/9_checkpoint.py 4

What is new: with FSDP (step 4) no rank has the whole state. Each rank writes its rows of every
parameter and moment to a separate file; an index says how many files there are. A run on another
number of ranks divides the same rows at other places: each rank reads, from every file that has
some, the rows that it needs. So the run goes on anywhere, and the losses are the same.
What it costs: 12 N bytes on disk, 12 N / n written by each rank at the same time; no tensor is sent
to another rank, and none is whole in memory. Two barriers.
Read next: 10_experts.py, in which tokens travel between ranks.

A folder is complete or absent: it is written under another name, and renamed when all ranks have
finished. What must be saved is all that a step changes: parameters, both moments, AdamW's count of
steps, and the position in the data, which here is the number of the step.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from common import STEPS, B, build_adamw, gradient_of, launch, read_step, summed_loss, update
from llama import Llama
from torch import Tensor, nn

fsdp = import_module("4_fsdp")  # a module whose name begins with a digit can't be imported by name

SAVE_AT = STEPS // 2


class Run:
    """A model divided among the ranks of a group, with its optimizer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        model = Llama()
        names = {parameter: name for name, parameter in model.named_parameters()}
        units = fsdp.build_units(model, group)
        self.model = model
        self.shards: dict[str, nn.Parameter] = {}
        for unit in units:
            for parameter, shard in zip(unit.whole, unit.shards, strict=True):
                self.shards[names[parameter]] = shard
        self.optimizer = build_adamw(self.shards.values())
        for shard in self.shards.values():  # AdamW makes these in its first step, too late to load
            moments = {"exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}
            self.optimizer.state[shard] = {"step": torch.zeros(()), **moments}

    def train_steps(self, first: int, last: int) -> list[float]:
        """Trains steps `first` .. `last`; returns their losses."""
        local = B // self.group.size()
        rank = dist.get_rank(self.group)
        losses = []
        for step in range(first, last + 1):
            tokens, labels = (rows[rank * local : (rank + 1) * local] for rows in read_step(step))
            loss = summed_loss(self.model(tokens), labels)
            loss.backward()
            squares = [gradient_of(shard).square().sum() for shard in self.shards.values()]
            sums = torch.stack((torch.stack(squares).sum(), loss.detach()))
            dist.all_reduce(sums, group=self.group)
            update(self.optimizer, sums[0].sqrt(), step)
            self.optimizer.zero_grad()
            losses.append(sums[1].item())
        return losses

    def state(self) -> dict[str, Tensor]:
        """This rank's rows of everything that a step changes: a name for each tensor.

        The tensors are the run's own: what is copied into them has been loaded.
        """
        # gap: the state, saving and loading
        tensors: dict[str, Tensor] = {}
        for name, shard in self.shards.items():
            tensors[name] = shard.detach()
            for key in ("exp_avg", "exp_avg_sq", "step"):
                tensors[f"{name}.{key}"] = self.optimizer.state[shard][key]
        return tensors

    def save(self, folder: Path, step: int) -> None:
        """Writes `rank-<r>.pt` of each rank and `index.json`; `folder` appears when complete."""
        rank = dist.get_rank(self.group)
        part = folder.with_suffix(".part")
        part.mkdir(exist_ok=True)
        torch.save(self.state(), part / f"rank-{rank}.pt")
        dist.barrier(self.group)  # all files are complete
        if rank == 0:
            index = {"step": step, "ranks": self.group.size()}
            (part / "index.json").write_text(json.dumps(index))
            part.rename(folder)
        dist.barrier(self.group)  # no rank reads before this

    def load(self, folder: Path) -> int:
        """Fills the state from a folder that any number of ranks has saved; returns its step.

        The files are mapped into memory, so only the rows that are copied are read.
        """
        index = json.loads((folder / "index.json").read_text())
        files = [torch.load(folder / f"rank-{i}.pt", mmap=True) for i in range(index["ranks"])]
        for name, own in self.state().items():
            if own.ndim == 0:  # the count of steps is the same on all ranks
                own.copy_(files[0][name])
                continue
            begin = dist.get_rank(self.group) * len(own)  # of this rank's rows in the whole
            for saver, file in enumerate(files):
                rows = file[name]
                shift = saver * len(rows) - begin  # of the file's first row in `own`
                low = max(0, shift)
                high = min(len(own), shift + len(rows))
                if low < high:
                    own[low:high] = rows[low - shift : high - shift]
        return int(index["step"])
        # end of gap


def train() -> list[float]:
    """The losses of the steps in which this rank took part: all 20 in the second run."""
    ranks = list(range(dist.get_world_size()))
    everyone = dist.new_group(ranks)
    half = ranks[: (len(ranks) + 1) // 2]
    fewer = dist.new_group(half)  # in practice: a new start with fewer processes
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0], f"step-{SAVE_AT}")
    first_run = Run(everyone)
    losses = first_run.train_steps(1, SAVE_AT)
    first_run.save(folder, SAVE_AT)
    del first_run
    if dist.get_rank() in half:
        second_run = Run(fewer)
        step = second_run.load(folder)
        losses += second_run.train_steps(step + 1, STEPS)  # its collectives wait for all to load
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    return losses


if __name__ == "__main__":
    launch(train, processes=4, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   save  torch.distributed.checkpoint.save  titanlite/checkpoint/storage.py: StepWriter
#   load  torch.distributed.checkpoint.load  titanlite/checkpoint/storage.py: StepReader
