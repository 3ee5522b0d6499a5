"""The device mesh: all ranks as a grid, one axis for each kind of parallelism.

What it is: six named axes. Five of them, here outermost first, divide all ranks. Inner axes
communicate most, so they map to neighbouring ranks, which share a node. An unused axis has size 1:
a sum over it changes nothing and a shard along it is the whole tensor, so most code need not ask
whether an axis is used.

    axis          differs between its ranks          equal on all its ranks
    pp            the layers held                    the batch
    dp_replicate  the sequences read                 the shard of the weights held
    dp_shard      the sequences read, the shard      the weights computed with
    cp            the part of each sequence, shard   the sequences, the weights computed with
    tp            the part of each matrix            the sequences

Context parallel ranks compute with the same weights on different tokens, as data parallel ranks do.
So weights are sharded over both: `dp_shard_cp` is dp_shard and cp as one axis.

The sixth, `ep`, divides dp_shard_cp once more, for experts only (`parallel/expert_parallel.py`):
they are divided over ep of these ranks, and sharded over the dp_shard_cp / ep ranks,
`expert_shard`, that hold the same experts.

What it costs: nine process groups, made at the start: four axes of one DeviceMesh and five of
another (`Mesh` says why there are two); with ep five more, of a third.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.distributed.torch_private import set_group_timeout

DATA_AXES = ("dp_replicate", "dp_shard")  # ranks along these axes read different sequences
# Ranks along these axes hold different parts of the loss
LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp")
TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # and these route different tokens to experts


class Mesh:
    """The grid of ranks. `mesh["tp"]` and `mesh["dp_replicate", "dp_shard_cp"]` are the submeshes
    that contain this rank.

    It has two DeviceMeshes over the same ranks, one with dp_shard_cp and one with dp_shard and cp,
    and with ep a third with expert_shard and ep: FSDP2 and tensor parallel need one mesh that has
    both their axes, and a DeviceMesh has no public way to join two of its axes (torch 2.11 to
    2.13). So pp, dp_replicate and tp each have a process group for each mesh, and only one is used.
    """

    def __init__(
        self, device_type: str, degrees: Mapping[str, int], timeout_seconds: int, ep: int = 1
    ) -> None:
        """`degrees`: axis -> size, outermost first; their product is the world size. `ep`: the
        number of ranks of dp_shard_cp that experts are divided over.
        """
        self.device_type = device_type
        self.degrees = dict(degrees)
        pp = degrees["pp"]
        replicas = degrees["dp_replicate"]
        shards = degrees["dp_shard"] * degrees["cp"]
        tp = degrees["tp"]
        grids = [
            {"pp": pp, "dp_replicate": replicas, "dp_shard_cp": shards, "tp": tp},
            dict(degrees),
        ]
        if ep > 1:
            outer = {"pp": pp, "dp_replicate": replicas, "expert_shard": shards // ep}
            grids.append({**outer, "ep": ep, "tp": tp})
        self._meshes = [
            init_device_mesh(device_type, tuple(grid.values()), mesh_dim_names=tuple(grid))
            for grid in grids
        ]
        for mesh in self._meshes:
            for group in mesh.get_all_groups():
                set_group_timeout(group, timeout_seconds)
        self.ep = ep
        self.layout = {**degrees, "ep": ep}  # what logs, checkpoints and sinks record
        # A cache, because indexing a DeviceMesh creates a new object
        self._lines: dict[tuple[str, ...], DeviceMesh] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Returns a submesh of the first of the meshes that has all these axes."""
        names = (axes,) if isinstance(axes, str) else axes
        if names not in self._lines:
            mesh = next(m for m in self._meshes if set(names) <= set(m.mesh_dim_names or ()))
            self._lines[names] = mesh[names]
        return self._lines[names]

    @property
    def data_size(self) -> int:
        """The number of ranks that read different sequences."""
        return self["dp_replicate"].size() * self["dp_shard"].size()

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that read different sequences: 0 .. data_size - 1."""
        return (
            self["dp_replicate"].get_local_rank() * self["dp_shard"].size()
            + self["dp_shard"].get_local_rank()
        )

    def axes_of_groups(self) -> dict[str, tuple[str, int]]:
        """Maps the name of each process group to its axis and its number of ranks.

        An axis that spans all ranks has the group `world`. Weights are sharded over dp_shard_cp,
        which is called dp_shard if cp is not used.
        """
        axes: dict[str, tuple[str, int]] = {}
        for mesh in self._meshes:
            for axis in mesh.mesh_dim_names or ():
                name = "dp_shard" if axis == "dp_shard_cp" and self.degrees["cp"] == 1 else axis
                axes[mesh[axis].get_group().group_name] = (name, mesh[axis].size())
        world = dist.group.WORLD
        assert world is not None
        axes[world.group_name] = ("world", dist.get_world_size())
        return axes

    def sum_counts(self, count: Tensor) -> Tensor:
        """Sums, in place, a count that each data parallel rank has for its own sequences."""
        return self._sum(count, DATA_AXES)

    def sum_losses(self, loss: Tensor) -> Tensor:
        """Sums, in place, the parts of a loss.

        Ranks without the output layer contribute zero.
        """
        return self._sum(loss, LOSS_AXES)

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Sums, in place, what each rank has for the tokens that it routes to experts."""
        return self._sum(values, TOKEN_AXES)

    def sum_stages(self, values: Tensor) -> Tensor:
        """Sums, in place, what each rank has for the blocks of its pipeline stages."""
        return self._sum(values, ("pp",))

    @torch.no_grad()
    def _sum(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Makes one all-reduce for each axis that has more than one rank."""
        for axis in axes:
            if self[axis].size() > 1:
                dist.all_reduce(value, group=self[axis].get_group())
        return value
