"""The device mesh: all ranks as a grid, one axis for each kind of parallelism.

What it is: five named axes, outermost first. Inner axes communicate most, so they map to
neighbouring ranks, which share a node. An unused axis has size 1: sums over it and shards along it
are the whole, so most code that uses an axis does not ask whether it is used.

    axis          differs between its ranks          equal on all its ranks
    pp            the layers held                    the batch
    dp_replicate  the sequences read                 the shard of the weights held
    dp_shard      the sequences read, the shard      the weights computed with
    cp            the part of each sequence, shard   the sequences, the weights computed with
    tp            the part of each matrix            the sequences

Context parallel ranks compute with the same weights on different tokens, as data parallel ranks do.
So weights are sharded over both: `dp_shard_cp` is dp_shard and cp as one axis.

What it costs: nine process groups, made at the start: four axes of one DeviceMesh and five of
another (`Mesh` says why there are two).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.distributed.torch_private import set_group_timeout

DATA_AXES = ("dp_replicate", "dp_shard")  # ranks along these read different sequences
# Ranks along these hold different parts of the loss
LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp")


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of long sums on a device: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


class Mesh:
    """The grid of ranks. `mesh["tp"]` and `mesh["dp_replicate", "dp_shard_cp"]` are submeshes with
    this rank.

    It has two DeviceMeshes over the same ranks, one with dp_shard_cp and one with dp_shard and cp:
    FSDP2 and tensor parallel need one mesh that has both their axes, and a DeviceMesh has no public
    way to join two of its axes (torch 2.11 to 2.13). So pp, dp_replicate and tp have two process
    groups each, of which one is used.
    """

    def __init__(self, device_type: str, degrees: Mapping[str, int], timeout_seconds: int) -> None:
        """`degrees`: axis -> size, outermost first; their product is the world size."""
        self.device_type = device_type
        self.degrees = dict(degrees)
        # torch has no mesh for it: it is for one process
        device_type = "cpu" if device_type == "mps" else device_type
        sizes = {"pp": degrees["pp"], "dp_replicate": degrees["dp_replicate"]}
        sizes |= {"dp_shard_cp": degrees["dp_shard"] * degrees["cp"], "tp": degrees["tp"]}
        self._weights, self._tokens = (
            init_device_mesh(device_type, tuple(s.values()), mesh_dim_names=tuple(s))
            for s in (sizes, degrees)
        )
        for group in (*self._weights.get_all_groups(), *self._tokens.get_all_groups()):
            set_group_timeout(group, timeout_seconds)
        # Cached: indexing a DeviceMesh creates a new object
        self._lines: dict[str | tuple[str, ...], DeviceMesh] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        if axes not in self._lines:
            names = {axes} if isinstance(axes, str) else set(axes)
            mesh = (
                self._weights if names <= set(self._weights.mesh_dim_names or ()) else self._tokens
            )
            self._lines[axes] = mesh[axes]
        return self._lines[axes]

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
        """The name of each process group -> its axis and its number of ranks.

        The group of all ranks, which every axis of that size has, is `world`. Weights are sharded
        over dp_shard_cp, which is called dp_shard where cp is not used.
        """
        axes: dict[str, tuple[str, int]] = {}
        for mesh in (self._weights, self._tokens):
            for axis in mesh.mesh_dim_names or ():
                name = "dp_shard" if axis == "dp_shard_cp" and self.degrees["cp"] == 1 else axis
                axes[mesh[axis].get_group().group_name] = (name, mesh[axis].size())
        world = dist.group.WORLD
        assert world is not None
        axes[world.group_name] = ("world", dist.get_world_size())
        return axes

    def sum_counts(self, count: Tensor) -> Tensor:
        """The sum, in place, of a count that each data parallel rank has for its own sequences."""
        return self._sum(count, DATA_AXES)

    def sum_losses(self, loss: Tensor) -> Tensor:
        """The sum, in place, of the parts of a loss.

        Ranks without the output layer contribute zero.
        """
        return self._sum(loss, LOSS_AXES)

    @torch.no_grad()
    def _sum(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """One all-reduce for each of the axes that has more than one rank."""
        for axis in axes:
            if self[axis].size() > 1:
                dist.all_reduce(value, group=self[axis].get_group())
        return value
