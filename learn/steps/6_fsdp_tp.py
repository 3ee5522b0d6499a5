"""Step 6: FSDP and tensor parallel together. Each rank has a place on two axes.

    python learn/steps/6_fsdp_tp.py 4

What is new: a mesh. With 4 ranks and tp 2, ranks 0, 1 and ranks 2, 3 are the two tensor-parallel
groups: the ranks of one share a part of the batch. Ranks 0, 2 and ranks 1, 3 are the data-parallel
groups: the ranks of one have the same part of each layer, which FSDP divides further. So tensor
parallel comes first and FSDP divides what it has left: of wq's 64 rows the ranks 0 to 3 hold rows
0-15, 32-47, 16-31, 48-63. Neighbouring ranks share a node, and tensor parallel sends most, so it
has the inner axis.
What it costs: 16 N / (dp tp) bytes, and 8 / tp for each parameter of one unit. The collectives of
step 4, of 1/tp of the parameters, and those of step 5, of 1/dp of the batch. The classes are those
of steps 4 and 5, unchanged.
Read next: 7_pipeline.py, which divides the model by its layers.

The gradient norm needs care: a matrix's number exists once among all ranks, a norm weight's number
exists tp times. Each rank divides its squares by the number of ranks that hold the same number;
then one sum over all ranks is right, however the axes are arranged.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import STEPS, TARGETS, B, build_adamw, gradient_of, launch, read_step, update
from llama import Llama
from torch import Tensor, nn

fsdp = import_module("4_fsdp")  # a module whose name begins with a digit can't be imported by name
tensor_parallel = import_module("5_tensor_parallel")

TP = 2


class Mesh(NamedTuple):
    """The groups of this rank, and its place in each."""

    dp: dist.ProcessGroup
    tp: dist.ProcessGroup
    dp_rank: int
    tp_rank: int
    dp_size: int
    tp_size: int


def build_mesh(tp_size: int) -> Mesh:
    """Arranges all ranks as a matrix (dp, tp) in the order of their numbers.

    Every rank creates every group, also those that it is not in, in the same order: creating a
    group is a collective of all ranks.
    """
    # gap: the mesh, the order of the two, the norm
    world_size = dist.get_world_size()
    ranks = torch.arange(world_size).view(-1, tp_size)  # (dp, tp)
    row, column = divmod(dist.get_rank(), tp_size)
    rows = [dist.new_group(members) for members in ranks.tolist()]
    columns = [dist.new_group(members) for members in ranks.T.tolist()]
    tp_group = rows[row]
    dp_group = columns[column]
    return Mesh(dp_group, tp_group, row, column, len(ranks), tp_size)


def parallelize(model: Llama, mesh: Mesh) -> list[nn.Parameter]:
    """Tensor parallel within `mesh.tp`, then FSDP within `mesh.dp`.

    Returns this rank's shards, which the optimizer updates.
    """
    tensor_parallel.apply_tp(model, mesh.tp)
    units = fsdp.build_units(model, mesh.dp)
    return [shard for unit in units for shard in unit.shards]


def gradient_norm(shards: list[nn.Parameter], mesh: Mesh) -> Tensor:
    """The norm of the gradient of the whole model, the same on every rank."""
    square = torch.zeros(())
    for shard in shards:
        holders = 1  # ranks that hold the same numbers
        if shard.ndim == 1:  # the weight of a norm: FSDP divides it, tensor parallel does not
            holders = mesh.tp_size
        square += gradient_of(shard).square().sum() / holders
    dist.all_reduce(square)  # over both axes
    return square.sqrt()
    # end of gap


def train() -> list[float]:
    """The losses of all steps, the same on every rank."""
    mesh = build_mesh(min(TP, dist.get_world_size()))
    local = B // mesh.dp_size  # sequences of this tensor-parallel group
    model = Llama()
    shards = parallelize(model, mesh)
    optimizer = build_adamw(shards)
    losses = []
    for step in range(1, STEPS + 1):
        part = slice(mesh.dp_rank * local, (mesh.dp_rank + 1) * local)
        tokens, labels = (rows[part] for rows in read_step(step))
        logits = model(tokens)  # (B/dp, S, V/tp)
        own = labels - mesh.tp_rank * logits.shape[-1]
        loss = tensor_parallel.VocabularyLoss.apply(logits, own, mesh.tp) / TARGETS
        loss.backward()
        update(optimizer, gradient_norm(shards, mesh), step)
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.dp)  # the ranks along tp have the same loss
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    launch(train, processes=4, allowed=(1, 2, 4, 8))

# With torch, and in titanlite:
#   build_mesh     torch.distributed.init_device_mesh  titanlite/distributed/mesh.py: Mesh
#   parallelize    parallelize_module, fully_shard  titanlite/parallel/parallelize.py: parallelize
#   gradient_norm  DTensor.full_tensor of the norm     titanlite/optim/clip.py: clip_gradients
#   holders        the placements of a DTensor         titanlite/distributed/dtensor.py: num_holders
