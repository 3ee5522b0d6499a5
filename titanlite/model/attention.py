"""Causal attention, and which kernel computes it.

What it is: a call of `F.scaled_dot_product_attention`, which chooses between cuDNN, FlashAttention
(arXiv 2307.08691), a memory-efficient kernel (arXiv 2112.05682) and plain matrix products, the
first that supports device, dtype, shapes and mask. The order is torch's: from 2.10 on it begins
with cuDNN on Hopper and Blackwell data-centre GPUs, if cuDNN is newer than 9.15.0; that version and
older ones compute some sequence lengths wrongly (pytorch#169849). With `data.document_mask`, or
with a sliding window (arXiv 2310.06825) that is shorter than the sequence, the mask is a tensor, or
on CUDA a list of blocks (`block_mask.py`).
What it costs: B S^2 H Dh multiply-adds in the forward, half of two whole matrix products, because
of the mask. Plain products also store S^2 numbers for each head, which the other kernels do not.
The kernel is logged at the start (`observe/start_and_end.py`), unless there are masks. A mask that
is a tensor takes B S^2 bytes, and all pairs are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from titanlite.model.block_mask import block_attention

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias  # slow to import

Mask: TypeAlias = "Tensor | BlockMask | CausalBias"
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, causal: bool = False
) -> Tensor:
    """Computes attention: q (B, H, Sq, Dh), k and v (B, K, Sk, Dh) -> (B, H, Sq, Dh).

    H / K query heads share a key/value head.
    """
    if isinstance(mask, BlockMask):  # on CUDA
        return block_attention(q, k, v, mask)
    k = share_heads(q, k, mask)
    v = share_heads(q, v, mask)
    biased = mask is not None and not is_document_mask(mask)
    if q.is_cuda and q.dtype == torch.float32 and biased:
        # torch's causal bias in fp32: its backward returns gradients that are contiguous as
        # (B, S, H, Dh), but torch tells the compiler to expect the layout of the inputs, and
        # compiled code raises an error (torch 2.11).
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if q.is_cuda and is_document_mask(mask):
        # cuDNN 9.19 computes NaN gradients for some lengths (pytorch#196678)
        with sdpa_kernel(NOT_CUDNN):
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def document_mask(
    documents: Tensor, start: int = 0, end: int | None = None, window: int = 0
) -> Tensor:
    """Builds a mask: which keys before `end` queries start .. end - 1 attend to.

    Returns bool (B, 1, queries, keys). A query attends to the keys of its document up to its
    position, with a window to the last `window` of these at most. `documents` (B, S): the number
    of each token's document, not descending in a row; without `end`, it is S.
    """
    documents = documents[:, :end]
    positions = torch.arange(documents.shape[1], device=documents.device)
    same_document = documents[:, start:, None] == documents[:, None]  # (B, queries, keys)
    distance = positions[start:, None] - positions  # (queries, keys)
    allowed = distance >= 0
    if window > 0:
        allowed = allowed & (distance < window)
    return (same_document & allowed)[:, None]


def share_heads(q: Tensor, x: Tensor, mask: Mask | None = None) -> Tensor:
    """Repeats the heads of keys or values `x` to H where no fused kernel supports fewer.

    None does on CUDA in fp32 (torch 2.11), or with a mask from `document_mask`.
    """
    queries_per_key = q.shape[1] // x.shape[1]
    needed = q.is_cuda and (q.dtype == torch.float32 or is_document_mask(mask))
    if queries_per_key > 1 and needed:
        return x.repeat_interleave(queries_per_key, dim=1)
    return x


def is_document_mask(mask: Mask | None) -> bool:
    """Whether a mask is a tensor from `document_mask`; torch's causal bias has another dtype."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool
