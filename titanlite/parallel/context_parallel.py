"""Context parallel: each sequence is cut over the ranks of the cp axis.

What it is: every module but attention works on single tokens, so each rank computes S/cp tokens. In
attention a query needs the keys and values of all earlier tokens. There are two ways to get them:

* `all_gather` (Llama 3, arXiv 2407.21783, section 3.3.2): every rank all-gathers the keys and
  values of the layer. With grouped-query attention these are small: K heads, against H heads of
  queries.
* `ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all turns "all heads, S/cp tokens" into
  "H/cp heads, all tokens", plain attention follows, and another all-to-all restores the first
  layout. cp must divide H and K.

A causal mask makes late tokens cost more than early ones. So with all_gather the sequence is
cut into 2 cp chunks, and rank r holds chunk r (of the first half) and chunk 2 cp - 1 - r (of the
second half): its queries attend to (r+1) + (2 cp - r) = 2 cp + 1 chunks, the same number for every
r. With Ulysses each rank attends over the whole sequence, so contiguous parts are balanced anyway.

    cp = 2, 8 tokens     rank 0: 0 1 6 7     rank 1: 2 3 4 5

Why it is here: the activations of a long sequence do not fit on one device; with grouped-query
attention cp is cheap. What it costs, per rank, block and local batch, with b bytes per number, H
and K after the division by tp: all_gather moves 2 b B S K Dh (cp-1)/cp forward (keys and values)
and as much backward (the sum of their gradients), and with `recompute.mode` full or selective it
gathers keys and values again, 6 b B S K Dh (cp-1)/cp in all; ulysses moves b B S (2H + 2K) Dh
(cp-1)/cp^2 in each direction. Activations are 1/cp; FSDP shards weights over cp as it does over
dp_shard. (On gloo DTensor has no all-to-all: it gathers and cuts instead, which sends more bytes
and gives equal numbers.)

Positions: a rank's RoPE table has the rows of its tokens. Labels are shifted by one before the
sequence is cut (in `data/rows.py`), and then cut like tokens. After the cut a rank could not
shift them: label s is token s + 1, and for the last token of a chunk that token can be on another
rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right

from titanlite.data.rows import Batch
from titanlite.model.attention import Mask, attention

if TYPE_CHECKING:
    from titanlite.model.llama import Llama

# Placements of a tensor (B, heads, S, Dh)
HEAD_SHARD = Shard(1)
SEQUENCE_SHARD = Shard(2)


def local_positions(seq_len: int, mesh: DeviceMesh, method: str) -> Tensor:
    """Returns the positions of a sequence that this rank holds, int64 (S/cp,)."""
    size = mesh.size()
    positions = torch.arange(seq_len)
    if method == "ulysses":
        return positions.chunk(size)[mesh.get_local_rank()]
    return torch.cat([positions.chunk(2 * size)[index] for index in own_chunks(mesh)])


def own_chunks(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns which of the 2 cp chunks of a sequence this rank holds: one of each half."""
    rank = mesh.get_local_rank()
    size = mesh.size()
    return rank, 2 * size - 1 - rank


def apply_cp(model: Llama, mesh: DeviceMesh, method: str) -> None:
    """Replaces each block's inner attention, and sets the positions of this rank's tokens."""
    model.positions = local_positions(model.seq_len, mesh, method)
    attend: nn.Module = UlyssesAttention(mesh)
    if method == "all_gather":
        attend = AllGatherAttention(model.seq_len, mesh)
        build = cast("Callable[[Tensor, int, int, int], Mask]", model.document_mask)
        model.document_mask = functools.partial(document_masks, mesh=mesh, build=build)
    for block in model.layers.values():
        block.set_submodule("attention.attend", attend)  # one for all: it has no parameters


class BatchSharder:
    """Cuts batches for this rank of the cp axis, which may have one rank."""

    def __init__(self, seq_len: int, mesh: DeviceMesh, method: str, device: torch.device) -> None:
        self.size = mesh.size()
        self.positions = local_positions(seq_len, mesh, method).to(device)

    def shard_batch(self, batch: Batch) -> Batch:
        """Returns this rank's part (B, S/cp) of a batch (B, S)."""
        if self.size == 1:
            return batch
        return batch.apply(lambda tensor: tensor[:, self.positions])


def chunk_masks(seq_len: int, mesh: DeviceMesh) -> list[Mask]:
    """Builds the masks of the head and the tail chunk: (S/2cp queries, all keys up to the chunk's
    last), aligned at the end.

    A kernel that supports such a mask needs no tensor for it. The masks are built outside of the
    compiled blocks, because the compiler cannot build them.
    """
    chunk = seq_len // (2 * mesh.size())
    return [causal_lower_right(chunk, (index + 1) * chunk) for index in own_chunks(mesh)]


def document_masks(
    documents: Tensor,
    mesh: DeviceMesh,
    build: Callable[[Tensor, int, int, int], Mask],
    window: int,
) -> list[Mask]:
    """Builds the two masks with `build` for sequences of several documents (B, S), or with a
    window: each query attends to its document only, and to the last `window` positions of it.
    """
    chunk = documents.shape[1] // (2 * mesh.size())
    return [
        build(documents, index * chunk, (index + 1) * chunk, window) for index in own_chunks(mesh)
    ]


class AllGatherAttention(nn.Module):
    """Causal attention of the queries of this rank's head and tail chunk."""

    def __init__(self, seq_len: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.masks = chunk_masks(seq_len, mesh)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: list[Mask] | None = None
    ) -> Tensor:
        """Computes attention: q (B, H, S/cp, Dh), k and v (B, K, S/cp, Dh) -> (B, H, S/cp, Dh).

        `documents`: the masks of `document_masks`, which replace `masks`; or None.
        """
        size = self.mesh.size()
        both = torch.stack((k, v))  # (2, B, K, S/cp, Dh): one all-gather for both
        sharded = DTensor.from_local(both, self.mesh, [Shard(3)])
        gathered = sharded.redistribute(placements=[Replicate()])
        # Each rank attends with its queries only: its gradient of the keys is one term of a sum
        chunks = gathered.to_local(grad_placements=[Partial()]).chunk(2 * size, dim=3)
        # Chunks are in the order of ranks: 0, 2 cp - 1, 1, 2 cp - 2, ... Sort them by position:
        heads = [2 * rank for rank in range(size)]
        tails = [2 * rank + 1 for rank in reversed(range(size))]
        order = heads + tails
        outputs = []
        for chunk, index, mask in zip(
            q.chunk(2, dim=2), own_chunks(self.mesh), documents or self.masks, strict=True
        ):
            # Each (B, K, (index + 1) S/2cp, Dh)
            keys, values = torch.cat([chunks[i] for i in order[: index + 1]], dim=3)
            outputs.append(attention(chunk, keys, values, mask))
        return torch.cat(outputs, dim=2)


class UlyssesAttention(nn.Module):
    """Causal attention of H/cp heads over the whole sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Computes attention with shapes as in `AllGatherAttention`."""
        q = self.exchange(q, SEQUENCE_SHARD, HEAD_SHARD)  # (B, H/cp, S, Dh)
        k = self.exchange(k, SEQUENCE_SHARD, HEAD_SHARD)  # (B, K/cp, S, Dh)
        v = self.exchange(v, SEQUENCE_SHARD, HEAD_SHARD)
        out = attention(q, k, v, mask, causal=mask is None)
        return self.exchange(out, HEAD_SHARD, SEQUENCE_SHARD)  # (B, H, S/cp, Dh)

    def exchange(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        sharded = DTensor.from_local(x, self.mesh, [source])
        return sharded.redistribute(placements=[target]).to_local()
