"""Causal attention, and which kernel computes it.

What it is: a call of `F.scaled_dot_product_attention`, which chooses between cuDNN, FlashAttention
(arXiv 2307.08691), a memory-efficient kernel (arXiv 2112.05682) and plain matrix products, the
first that supports device, dtype, shapes and mask. The order is torch's: from 2.10 on it begins
with cuDNN on Hopper and Blackwell data-centre GPUs, if cuDNN is newer than 9.15.0; that version and
older ones compute some sequence lengths wrongly (pytorch#169849). With `data.document_mask` the
mask is a tensor, or on CUDA a list of blocks (`block_mask.py`).
What it costs: B S^2 H Dh multiply-adds in the forward, half of two whole matrix products, because
of the mask. Plain products also store S^2 numbers for each head, which the other kernels do not.
The chosen kernel is logged at the start, unless there are masks. A mask that is a tensor takes B
S^2 bytes, and all pairs are computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.flex_attention import BlockMask

from titanlite.distributed.torch_private import attention_backend


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, causal: bool = False) -> Tensor:
    """q (B, H, Sq, Dh), k and v (B, K, Sk, Dh) -> (B, H, Sq, Dh).

    H / K query heads share a key/value head.
    """
    if isinstance(mask, BlockMask):
        from titanlite.model.block_mask import block_attention  # on CUDA, with data.document_mask

        return block_attention(q, k, v, mask)
    k, v = (share_heads(q, x, mask) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def document_mask(documents: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Which keys before `end` the queries start .. end - 1 attend to: bool (B, 1, end - start,
    end).

    A query attends to the keys of its document up to its position. `documents` (B, S): the number
    of each token's document, not descending in a row; without `end`, it is S.
    """
    documents = documents[:, :end]
    index = torch.arange(documents.shape[1], device=documents.device)
    return ((documents[:, start:, None] == documents[:, None]) & (index[start:, None] >= index))[
        :, None
    ]


def share_heads(q: Tensor, x: Tensor, mask: Any = None) -> Tensor:
    """`x`, keys or values, with H heads where no fused kernel supports fewer.

    That is on CUDA in fp32 (torch 2.11), and with a mask from `document_mask`.
    """
    groups = q.shape[1] // x.shape[1]
    masked = mask is not None and not isinstance(mask, CausalBias)
    repeats = q.is_cuda and (q.dtype == torch.float32 or masked)
    return x.repeat_interleave(groups, dim=1) if groups > 1 and repeats else x


def attention_kernel(config: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel for a model of this shape on whole sequences in training: cudnn, flash, efficient
    or math.
    """
    q, k = (torch.empty(1, heads, seq_len, config.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (config.num_heads, config.num_kv_heads))  # fmt: skip
    k = share_heads(q, k)
    shared = q.shape[1] != k.shape[1]
    choice = (
        SDPBackend.MATH
        if device.type == "mps"
        else SDPBackend(attention_backend(q, k, k, enable_gqa=shared))
    )
    return choice.name.removesuffix("_ATTENTION").lower()
