"""Context parallel: each sequence is cut over C processes.

What it is: every module but attention works on single tokens, so a process computes S/C of them. In attention a query
needs the keys and values of all earlier tokens, and there are three ways to them:

* `all_gather` (Llama 3, arXiv 2407.21783, section 3.3.2): every process gathers all keys and values of the layer.
  With GQA these are few: K heads where there are H of queries.
* `ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all turns "all heads, S/C tokens" into "H/C heads, all
  tokens", plain attention follows, and another all-to-all turns it back. H and K must divide by C.
* `ring` (arXiv 2310.01889): keys and values go round in C - 1 steps, each beside the attention to the last ones.
  torch's own, through `context_parallel`, and for CUDA only. It knows no GQA, so heads are repeated before.

A causal mask makes late tokens cost more than early ones. So with all_gather and ring the sequence is cut into 2C
chunks, and process r has chunks r (from the head) and 2C-1-r (from the tail): r+1 + 2C-r = 2C+1 chunks to look at, for
every r. Ulysses has whole sequences, so contiguous parts are as good.

    C = 2, 8 tokens     process 0: 0 1 6 7     process 1: 2 3 4 5

What it costs, per process, block and microbatch, with b bytes per number, Dh the width of a head, and H and K those
that tp leaves: all_gather moves 2 b B S K Dh (C-1)/C in the forward (keys and values), and as much in the backward (the
sum of their gradients); ulysses b B S (2H + 2K) Dh (C-1)/C^2 each way; ring 2 b B S H Dh (C-1)/C in the forward, and in
the backward that again and their gradients. Activations are 1/C; weights are sharded over C by FSDP, as over dp_shard.
(gloo has no all-to-all for DTensor, which gathers and cuts there instead: more bytes, equal numbers.)

Positions: the RoPE table's rows are those of the tokens that a process has. Labels are cut like tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import CausalBias, causal_lower_right

from titanlite.config.schema import ConfigError
from titanlite.distributed.torch_private import set_ring_rotation

HEAD_SHARD, SEQUENCE_SHARD = Shard(1), Shard(2)  # of a tensor (B, heads, S, Dh)


def local_positions(seq_len: int, mesh: DeviceMesh, method: str) -> Tensor:
    """Which positions of a sequence this process has, int64 (S/C,)."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if size == 1 or method == "ulysses":
        return torch.arange(seq_len).chunk(size)[rank]
    chunks = torch.arange(seq_len).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def apply_cp(model: Any, mesh: DeviceMesh, method: str) -> None:
    """Replaces each block's inner attention, and gives the model the positions of its tokens."""
    if mesh.size() == 1:
        return
    if method == "ring":
        if mesh.device_type != "cuda":
            raise ConfigError("parallel.cp_method = ring needs CUDA devices; allowed here: all_gather, ulysses")
        set_ring_rotation("alltoall")
        attend: Any = ring_attention
    else:
        model.positions = local_positions(model.seq_len, mesh, method)
        attend = functools.partial(ulysses_attention, mesh=mesh)
        if method == "all_gather":
            attend = functools.partial(all_gather_attention, mesh=mesh, masks=chunk_masks(model.seq_len, mesh))
    for block in model.layers.values():
        block.attention.attend.forward = attend


class BatchSharder:
    """Cuts batches for this process of the cp axis."""

    def __init__(self, models: list[Any], mesh: DeviceMesh, method: str, device: torch.device) -> None:
        """`models`: the parts of the model here, whose RoPE tables a ring cuts along."""
        self.models, self.mesh, self.method = models, mesh, method
        self.here = local_positions(models[0].seq_len, mesh, method).to(device)

    @contextlib.contextmanager
    def cut(self, tokens: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part (B, S/C) of tokens and labels (B, S); within it attention sees the whole sequence."""
        if self.mesh.size() == 1:
            yield tokens, labels
        elif self.method == "ring":
            from torch.distributed.tensor.experimental import context_parallel

            buffers = [tokens, labels, *(model.rope for model in self.models)]  # cut in place; the tables are put back
            dims = [1, 1, *(0 for _ in self.models)]
            own = {tokens, labels}
            with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=own):
                yield tokens, labels
        else:
            yield tokens[:, self.here], labels[:, self.here]


def chunk_masks(seq_len: int, mesh: DeviceMesh) -> list[CausalBias]:
    """For the head and the tail chunk: (S/2C queries, all keys up to the chunk's last), the last of both aligned.

    No tensor is made of it where the device's attention knows such a mask. Made here, since the compiler cannot.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    chunk = seq_len // (2 * size)
    return [causal_lower_right(chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)]


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, masks: list[CausalBias]) -> Tensor:
    """Causal attention of this process's head and tail chunk to all keys before them.

    q (B, H, S/C, Dh), k and v (B, K, S/C, Dh) -> (B, H, S/C, Dh).
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    both = torch.stack((k, v))  # (2, B, K, S/C, Dh): one gather for both
    gathered = DTensor.from_local(both, mesh, [Shard(3)]).redistribute(placements=[Replicate()])
    # Each process uses the keys for its own queries only, so their gradients are parts of a sum.
    # In process order: chunks 0, 2C-1, 1, 2C-2, ...
    chunks = gathered.to_local(grad_placements=[Partial()]).chunk(2 * size, dim=3)
    order = [2 * i if i < size else 2 * (2 * size - 1 - i) + 1 for i in range(2 * size)]
    outputs = []
    for chunk, index, mask in zip(q.chunk(2, dim=2), (rank, 2 * size - 1 - rank), masks, strict=True):
        keys, values = torch.cat([chunks[i] for i in order[: index + 1]], dim=3)  # each (B, K, (index + 1) S/2C, Dh)
        outputs.append(F.scaled_dot_product_attention(chunk, keys, values, mask, enable_gqa=q.shape[1] != k.shape[1]))
    return torch.cat(outputs, dim=2)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
    """Causal attention of H/C heads over the whole sequence; shapes as in `gathered_attention`."""

    def exchange(x: Tensor, source: Shard, target: Shard) -> Tensor:
        return DTensor.from_local(x, mesh, [source]).redistribute(placements=[target]).to_local()

    q, k, v = (exchange(x, SEQUENCE_SHARD, HEAD_SHARD) for x in (q, k, v))  # (B, H/C or K/C, S, Dh)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return exchange(out, HEAD_SHARD, SEQUENCE_SHARD)  # (B, H, S/C, Dh)


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention, which `context_parallel` turns into a ring. That knows no GQA: heads are repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
