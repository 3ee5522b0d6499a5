"""`debug.cudnn_attention = false`: attention without cuDNN's kernels.

What it is: torch then chooses among its other kernels, FlashAttention first.
Why it is here: cuDNN is torch's first choice on Hopper and Blackwell data-centre GPUs, and releases
of it have computed some lengths wrongly (pytorch#169849). One key shows whether it is the cause of
a loss that differs. The choice is compiled into a block, and torch's caches of compiled code do not
record it. So a mark is added to their key: otherwise a run could use code with the other setting.
What it costs: the difference in speed between the kernels; not measured.
"""

from __future__ import annotations

import torch
import torch.compiler.config as compiler_config

MARK = "without cuDNN's attention"


def choose_attention(cudnn: bool) -> None:
    """Chooses attention kernels for this process; call it before anything is compiled."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    if not cudnn and MARK not in compiler_config.cache_key_tag:
        compiler_config.cache_key_tag += MARK
