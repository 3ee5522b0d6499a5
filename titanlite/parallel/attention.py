"""Which kernel computes attention.

What it is: `F.scaled_dot_product_attention` chooses between cuDNN, FlashAttention (arXiv 2307.08691), a
memory-efficient kernel (arXiv 2112.05682) and plain matrix products. It takes the first in its order that supports the
dtype, shapes and mask. Here cuDNN is first on CUDA, because published measurements show it about twice as fast as
FlashAttention 2 on Hopper.
What it costs: nothing. The chosen kernel is logged at the start (not under context parallel, which uses other masks),
because plain products, if chosen unnoticed, would store S^2 numbers per head.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.distributed.torch_private import attention_backend

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def preferred_attention(device_type: str) -> contextlib.AbstractContextManager[None]:
    """A context in which attention uses the first supported kernel of ORDER; on CPU, torch's default."""
    return sdpa_kernel(ORDER, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()


def attention_kernel(config: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that training uses for a model of this shape on whole sequences: cudnn, flash, efficient or math."""
    q, k = (torch.empty(1, heads, seq_len, config.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (config.num_heads, config.num_kv_heads))  # fmt: skip
    with preferred_attention(device.type):
        choice = attention_backend(q, k, k, enable_gqa=config.num_heads != config.num_kv_heads)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
