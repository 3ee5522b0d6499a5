"""Which kernel computes attention.

What it is: `F.scaled_dot_product_attention` has several: cuDNN's, FlashAttention (arXiv 2307.08691), a memory-efficient
one (arXiv 2112.05682), and plain products. Without a word torch takes the first of its own order that fits dtype,
shapes and mask. Here cuDNN comes first on CUDA: others found it about twice as fast as FlashAttention 2 on Hopper.
What it costs: nothing. Which one is taken is printed at the start (not under context parallel, whose masks differ): a
silent fallback to plain products would keep S^2 numbers per head.
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
    """Within it attention takes the first of ORDER that fits; on CPU torch's own choice."""
    return sdpa_kernel(ORDER, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()


def attention_kernel(config: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the kernel for training a model of this shape on whole sequences: cudnn, flash, efficient, math."""
    q, k = (torch.empty(1, heads, seq_len, config.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (config.num_heads, config.num_kv_heads))  # fmt: skip
    with preferred_attention(device.type):
        choice = attention_backend(q, k, k, enable_gqa=config.num_heads != config.num_kv_heads)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
