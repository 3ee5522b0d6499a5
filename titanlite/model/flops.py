"""FLOPs of a training step and the peak of known devices: MFU (model FLOPs utilisation).

What it is: FLOPs per token by the formula of PaLM (arXiv 2204.02311, appendix B), and the dense
bf16 peak of known devices. As in published tables, the causal mask and document masks are not
discounted, and recomputation is not counted. A block with a sliding window of
w < S positions counts w keys per query instead of S. For a device that is not in the table MFU is
not reported.
"""

from __future__ import annotations

from titanlite.config.schema import LoraConfig
from titanlite.model.flavors import LlamaConfig, block_shapes

NO_ADAPTERS = LoraConfig()
# Dense bf16 peaks; the first entry that is a part of the device's name counts
PEAK_TFLOPS: dict[str, float] = {
    "A100": 312.0,
    "A6000": 154.85,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "MI300X": 1300.0,
    "MI325X": 1300.0,
    "MI355X": 2500.0,
    "MI250X": 191.5,
    "L40S": 362.0,
    "A10G": 70.0,
}


def num_adapter_parameters(model: LlamaConfig, lora: LoraConfig) -> int:
    """Counts the parameters of the adapters of `lora`; 0 without adapters."""
    total = 0
    adapted = [number for number in range(model.num_layers) if lora.adapts_layer(number)]
    for name, shape in block_shapes(model).items():
        if name.endswith(".weight") and name.split(".")[-2] in lora.target_names:
            total += lora.rank * sum(shape) * len(adapted)
    return total


def flops_per_token(model: LlamaConfig, seq_len: int, lora: LoraConfig = NO_ADAPTERS) -> int:
    """Counts the FLOPs of one token, forward and backward.

    6 per parameter of a matrix product, and 12 H Dh S for the attention of a block, or 12 H Dh w
    with a window of w < S. With adapters the model's own parameters have no gradient, and count 4.
    The input embedding is a lookup and is not counted, unless it is tied: then it is also the
    output projection.
    """
    lookup = 0 if model.tied_embeddings else model.vocab_size * model.dim
    # Keys per query, summed over the blocks
    keys = sum(window or seq_len for window in model.windows(seq_len))
    attention = 12 * model.num_heads * model.head_dim * keys
    per_parameter = 4 if lora.rank > 0 else 6
    matrices = per_parameter * (model.num_parameters - lookup)
    return matrices + 6 * num_adapter_parameters(model, lora) + attention


def peak_tflops(device_name: str) -> float | None:
    """Looks up a device's dense bf16 peak in TFLOP/s; None if it is not in the table."""
    for part, peak in PEAK_TFLOPS.items():
        if part in device_name:
            return peak
    return None
