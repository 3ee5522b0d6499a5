"""Attention within documents or a window on CUDA: FlexAttention and its block masks.

What it is: FlexAttention (arXiv 2412.05496) is a kernel that the compiler generates for a given
mask. The mask consists of a function of two positions, and lists of blocks of 128 queries and 128
keys: blocks without any allowed pair are skipped, and in blocks where all pairs are allowed the
function is not evaluated. Documents are contiguous, so the first and the last position of a block
determine its kind.
Why it is here: a mask as a tensor takes B S^2 bytes and is read in every layer, and the kernels
that accept one compute every pair. On a CPU that tensor is used (`attention.py`), because
FlexAttention has no backward there.
What it costs: a mask is about 4 B (S/128)^2 int32, computed once per microbatch without a host
sync. The cost of attention is proportional to the number of query-key pairs that the mask allows,
rounded up to blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # FlexAttention's default
SMALLEST_HEAD = 16  # the smallest head width that its kernels support


def block_mask(
    documents: Tensor, start: int = 0, end: int | None = None, window: int = 0
) -> BlockMask:
    """Builds the mask of `attention.document_mask`, with the same arguments, as blocks."""
    documents = documents[:, :end]
    end = documents.shape[1]
    # A tensor, because blocks whose masks differ in a Python number would be compiled one by one.
    # Without a window it is the whole length, which is more than any distance
    reach = torch.full((), window if window > 0 else end, device=documents.device)

    def attends(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query + start
        same_document = documents[b, position] == documents[b, key]
        return same_document & (position >= key) & (position - key < reach)

    q_first, q_last = _block_ends(start, end, documents.device)
    k_first, k_last = _block_ends(0, end, documents.device)
    q_first = q_first[:, None]
    q_last = q_last[:, None]

    # A block has an allowed pair if its closest causal pair (key not later than the query) is in
    # one document and in the window: every other causal pair is farther apart.
    closest_key = torch.minimum(k_last, q_last)  # (query blocks, key blocks)
    closest_query = torch.maximum(q_first, closest_key)
    same = documents[:, closest_query] == documents[:, closest_key]  # (B, query blocks, key blocks)
    some = (k_first <= q_last) & (closest_query - closest_key < reach) & same

    # If the farthest pair is in one document and in the window, so are all pairs. A partial block
    # at the end of the sequence does not count.
    whole = (q_last - q_first == BLOCK - 1) & (k_last - k_first == BLOCK - 1)
    same = documents[:, k_first][:, None] == documents[:, q_last]
    every = whole & (k_last <= q_first) & (q_last - k_first < reach) & same
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(end - start, end),
    )


def _block_ends(start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first and the last position of each block of start .. end - 1."""
    first = torch.arange(start, end, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=end - 1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many key blocks each query block has, and the indices of all key blocks.

    Chosen blocks come first. `chosen`: bool (B, query blocks, key blocks).
    """
    chosen = chosen[:, None].int()  # (B, 1, query blocks, key blocks)
    counts = chosen.sum(-1, dtype=torch.int32)
    indices = chosen.argsort(dim=-1, descending=True, stable=True).int()
    return counts, indices


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Computes attention: q (B, H, Sq, Dh), k and v (B, K, Sk, Dh) -> (B, H, Sq, Dh)."""
    # Outside of a compiled block it must be compiled here: uncompiled, it computes with plain
    # matrix products.
    kernel = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    out: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@functools.cache
def compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)
