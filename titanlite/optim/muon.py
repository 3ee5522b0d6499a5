"""Muon: momentum whose matrix is orthogonalised before it is applied.

What it is: for a matrix W with gradient G, an average m <- mu m + (1 - mu) G, Nesterov's
combination U = mu m + (1 - mu) G, and W <- W - lr scale O. O is U with all singular values near 1:
five steps of the Newton-Schulz iteration X <- a X + (b X X' + c (X X')^2) X, whose coefficients
raise small singular values fast and leave them between 0.7 and 1.2 (Jordan 2024,
https://kellerjordan.github.io/posts/muon). With scale = 0.2 sqrt(max(rows, columns)) the update has
the root mean square of AdamW's, so AdamW's learning rate and decay fit (Moonlight, arXiv
2502.16982); Jordan's is sqrt(max(1, rows / columns)). Embeddings, norms and the output layer are
AdamW's; both are one Optimizer here.

Why it is here: torch.optim.Muon (2.11 to 2.13) computes the right update for DTensors too, but each
product of the iteration communicates, every rank computes every matrix, always in bfloat16, and it
does not know `found_inf`.

How it is divided: the iteration needs whole matrices. Matrices of one shape are taken in groups,
with one matrix for each rank that shares them (dp_replicate, dp_shard, cp, tp). An all-to-all over
each axis turns a rank's parts of a group into one whole matrix. The rank orthogonalises it, and the
same all-to-alls in reverse return the parts. So all layouts compute the same; only which rank
computes which matrix differs.

Experts (E, rows, columns) are cut between matrices, not inside: each rank orthogonalises those that
it has. Ranks that have the same experts (dp_replicate, tp) compute the same.

    4 matrices of 4096 x 4096, dp_shard = 4: rank 2 holds rows 2048 to 3071 of each. It sends
    1024 x 4096 numbers to each other rank and gets matrix 2. After the iteration it sends their
    rows back.

What it costs: 4 bytes of state per parameter (fp32), half of AdamW's. The iteration of a matrix
with sides s <= l computes 20 s^2 l + 10 s^3 FLOPs on one rank. Each mesh axis of k ranks that
shards the matrices adds two all-to-alls, together 2 e N/k (k-1)/k bytes per rank, for N parameters
in matrices and e bytes per number (4, or 2 in bfloat16). Over dp_replicate only the way back is
needed, an all-gather. gloo has no all-to-all: DTensor gathers and cuts instead. Memory: three
matrices, and their parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titanlite.config.schema import OptimizerConfig
from titanlite.distributed.dtensor import local_gradient, local_part
from titanlite.optim.found_inf import found_inf_of, set_found_inf

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


class Axis(NamedTuple):
    """A mesh axis whose ranks share matrices (n, rows, columns)."""

    mesh: DeviceMesh  # one-dimensional
    placement: Placement  # how the axis shards the stacked matrices
    rows: int  # rows of the part of a matrix that the ranks along the axis share
    columns: int


class Muon(torch.optim.Optimizer):
    """Muon over some parameter groups, and another optimizer over the others."""

    honours_found_inf = True  # see found_inf.py; the other optimizer honours it too

    def __init__(
        self, matrices: list[dict[str, Any]], others: torch.optim.Optimizer, config: OptimizerConfig
    ) -> None:
        """`matrices`: parameter groups of matrices.

        The groups and the state of the optimizer `others` become part of this one.
        """
        self.config = config
        self.others = others
        defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([*matrices, *others.param_groups], defaults)
        self.matrices = self.param_groups[: len(matrices)]
        others.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf = found_inf_of(self)  # 1: change nothing
        for group in self.matrices:
            for matrices in _alike(group["params"]):
                self._update(matrices, group, found_inf)
        set_found_inf(self.others, found_inf)
        self.others.step()

    def _update(
        self, matrices: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        """Updates matrices that have the same shape and placement."""
        momentum = self.config.muon_momentum
        updates = []
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                dtype = getattr(torch, self.config.state_dtype)
                state["exp_avg"] = torch.zeros_like(matrix, dtype=dtype)
            gradient = local_gradient(matrix).float()
            stored = local_part(state["exp_avg"])
            average = stored.float().lerp(gradient, 1 - momentum)
            updates.append(gradient.lerp(average, momentum))  # Nesterov's combination
            _assign(stored, average, found_inf)

        directions = self._orthogonalize(updates, matrices[0])
        rate = group["lr"]
        step_size = rate * _scale(matrices[0].shape, self.config.muon_scale)
        for matrix, direction in zip(matrices, directions, strict=True):
            weight = local_part(matrix)
            new = weight.float() * (1 - rate * group["weight_decay"])
            # With parallel.cpu_offload the weight is in CPU memory
            new.sub_(direction.to(weight.device), alpha=step_size)
            _assign(weight, new, found_inf)

    def _orthogonalize(self, updates: list[Tensor], like: Tensor) -> Tensor:
        """Orthogonalizes n matrices, of which each rank has the parts `updates`, sharded as `like`.

        Returns this rank's parts, (n, this rank's rows, this rank's columns); of experts, the
        matrices of those that this rank has, (1, experts, rows, columns).
        """
        device_type = like.device.type
        if isinstance(like, DTensor):
            device_type = like.device_mesh.device_type  # the GPU, also with parallel.cpu_offload
        name = self.config.muon_dtype
        if name == "auto":
            name = "bfloat16" if device_type == "cuda" else "float32"

        parts = torch.stack(updates).to(device_type, getattr(torch, name))
        if like.ndim == 3:
            return orthogonalize(parts.flatten(0, 1)).view_as(parts).float()
        axes = _axes(like)
        shapes = []  # shape of `parts` before each all-to-all
        for axis in axes:
            shapes.append(parts.shape)
            whole = (len(parts), axis.rows, axis.columns)
            parts = _redistribute(parts, axis.mesh, whole, axis.placement, Shard(0))
        parts = orthogonalize(parts)  # (n / ranks, rows, columns)
        for axis, shape in zip(reversed(axes), reversed(shapes), strict=True):
            whole = (shape[0], axis.rows, axis.columns)
            if shape[0]:
                parts = _redistribute(parts, axis.mesh, whole, Shard(0), axis.placement)
            else:
                parts = parts.new_empty(shape)
        return parts.float()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Sets the singular values of each matrix (n, rows, columns) to between 0.7 and 1.2.

    The dtype stays. A singular value below 1e-3 of the norm stays smaller than 0.7.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    if x.numel():
        a, b, c = COEFFICIENTS
        for _ in range(STEPS):
            gram = x @ x.mT  # as large as the shorter side
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _scale(shape: torch.Size, kind: str) -> float:
    """Computes the factor of the learning rate.

    If all singular values are 1, a matrix has numbers of the size 1 / sqrt(max(rows, columns)).
    """
    rows, columns = shape[-2:]
    if kind == "adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups parameters with a gradient by shape and placement.

    A group has at most one parameter for each rank that shares them; experts are a group each.
    """
    alike: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        sharding: object = None
        if isinstance(parameter, DTensor):
            sharding = (parameter.device_mesh, parameter.placements)
        alike.setdefault((parameter.shape, sharding), []).append(parameter)
    for group in alike.values():
        num_ranks = 1
        if isinstance(group[0], DTensor) and group[0].ndim == 2:
            num_ranks = group[0].device_mesh.size()
        for i in range(0, len(group), num_ranks):
            yield group[i : i + num_ranks]


def _axes(matrix: Tensor) -> list[Axis]:
    """Lists the axes of a matrix's mesh, outermost first, without those of one rank.

    tp divides a matrix first, so the sizes for dp_shard are those of tp's part: then both divisions
    are plain shards.
    """
    if not isinstance(matrix, DTensor):
        return []
    sizes = list(matrix.shape)
    axes: list[Axis] = []
    for i in reversed(range(matrix.device_mesh.ndim)):
        mesh = _axis_mesh(matrix.device_mesh, i)
        # The dimension of a Shard, or of the _StridedShard with which FSDP shards tp's part
        dim = getattr(matrix.placements[i], "dim", None)
        placement = Replicate() if dim is None else Shard(dim + 1)
        axes.append(Axis(mesh, placement, sizes[0], sizes[1]))
        if dim is not None:
            portion = -(-sizes[dim] // mesh.size())
            remaining = sizes[dim] - portion * mesh.get_local_rank()
            sizes[dim] = max(0, min(portion, remaining))
    return [axis for axis in reversed(axes) if axis.mesh.size() > 1]


@functools.cache
def _axis_mesh(mesh: DeviceMesh, i: int) -> DeviceMesh:
    """Returns axis i of a mesh. Cached, because indexing a DeviceMesh creates a new object."""
    names = mesh.mesh_dim_names
    return mesh if mesh.ndim == 1 or names is None else mesh[names[i]]


def _redistribute(
    part: Tensor, mesh: DeviceMesh, shape: tuple[int, ...], old: Placement, new: Placement
) -> Tensor:
    """Changes the placement of a tensor (n, rows, columns); returns this rank's new part."""
    if not shape[0]:
        return part.new_empty(shape)
    stride = (shape[1] * shape[2], shape[2], 1)
    whole = DTensor.from_local(
        part, mesh, [old], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole.redistribute(placements=[new]).to_local()


def _assign(stored: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Sets `stored` to `new`, rounded to its dtype, unless `found_inf` is 1."""
    if found_inf is not None:
        new = torch.where(found_inf.to(stored.device) > 0, stored.float(), new)
    stored.copy_(new)
