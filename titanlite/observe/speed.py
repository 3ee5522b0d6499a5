"""The speed of training, for a logged step: docs/metrics.md explains the columns."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from titanlite.model.flavors import LlamaConfig
from titanlite.model.flops import flops_per_token, peak_tflops


def speed_columns(
    tokens: int, seconds: float, llama: LlamaConfig, seq_len: int, device_name: str
) -> dict[str, Any]:
    """Of `tokens`, over all ranks, in `seconds`.

    `mfu` is None for a device whose peak is not known.
    """
    tps = tokens / seconds / dist.get_world_size()
    tflops = tps * flops_per_token(llama, seq_len) / 1e12
    peak = peak_tflops(device_name)
    return {
        "tps": tps,
        "tps_global": tokens / seconds,
        "tflops": tflops,
        "mfu": 100 * tflops / peak if peak else None,
    }
