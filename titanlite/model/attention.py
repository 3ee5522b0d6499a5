"""Causal attention, and which kernel computes it.

What it is: a call of `F.scaled_dot_product_attention`, which chooses between cuDNN, FlashAttention (arXiv 2307.08691),
a memory-efficient kernel (arXiv 2112.05682) and plain matrix products, the first that supports device, dtype, shapes
and mask. The order is torch's: from 2.10 on it begins with cuDNN on Hopper and Blackwell data-centre GPUs, if cuDNN is
newer than 9.15.0; that version and older ones compute some sequence lengths wrongly (pytorch#169849).
What it costs: B S^2 H Dh multiply-adds in the forward, half of two whole matrix products, because of the mask. Plain
products also store S^2 numbers for each head, which the other kernels do not. The chosen kernel is logged at the start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from titanlite.distributed.torch_private import attention_backend


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, causal: bool = False) -> Tensor:
    """q (B, H, Sq, Dh), k and v (B, K, Sk, Dh) -> (B, H, Sq, Dh). H / K query heads share a key/value head."""
    k, v = (share_heads(q, x) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def share_heads(q: Tensor, x: Tensor) -> Tensor:
    """`x`, keys or values, with H heads where no fused kernel supports fewer: in fp32 on CUDA (torch 2.11)."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 and q.is_cuda and q.dtype == torch.float32 else x


def attention_kernel(config: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel for a model of this shape on whole sequences in training: cudnn, flash, efficient or math."""
    q, k = (torch.empty(1, heads, seq_len, config.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (config.num_heads, config.num_kv_heads))  # fmt: skip
    k = share_heads(q, k)
    choice = attention_backend(q, k, k, enable_gqa=q.shape[1] != k.shape[1])
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
