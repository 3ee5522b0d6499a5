"""FLOPs of a training step and the peak of known devices: MFU (model FLOPs utilisation).

What it is: FLOPs per token by the formula of PaLM (arXiv 2204.02311, appendix B), and the dense
bf16 peak of known devices. As in published tables, the causal mask and document masks are not
discounted, and recomputation is not counted. A block with a sliding window of
w < S positions counts w keys per query instead of S. For a device that is not in the table MFU is
not reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from titanlite.config.schema import LoraConfig
from titanlite.model.flavors import LlamaConfig, block_shapes, parameter_shapes

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


# What a block computes, in order; operations of one group do not follow one another
ORDER: list[tuple[str, ...]] = [
    ("attention_norm.weight",),
    tuple(f"attention.w{x}.{kind}" for x in "qkv" for kind in ("weight", "bias")),
    ("attention.q_norm.weight", "attention.k_norm.weight"),
    ("attention",),
    ("attention.wo.weight",),
    ("ffn_norm.weight",),
    ("feed_forward.router.weight",),
    tuple(f"feed_forward.{part}w{x}.weight" for part in ("", "experts.") for x in "13"),
    ("feed_forward.w2.weight", "feed_forward.experts.w2.weight"),
]


def num_adapter_parameters(model: LlamaConfig, lora: LoraConfig) -> int:
    """Counts the parameters of the adapters of `lora`; 0 without adapters."""
    total = 0
    adapted = [number for number in range(model.num_layers) if lora.adapts_layer(number)]
    for name, shape in block_shapes(model).items():
        if name.endswith(".weight") and name.split(".")[-2] in lora.target_names:
            total += lora.rank * sum(shape) * len(adapted)
    return total


def is_trained(name: str, model: LlamaConfig, lora: LoraConfig, frozen: Sequence[str]) -> bool:
    """Whether one of the model's own parameters is trained: not under adapters, and not if a
    pattern in `frozen` (`training.frozen`) fits. A tied output layer is the embedding.
    """
    if name == "output.weight" and model.tied_embeddings:
        name = "tok_embeddings.weight"
    return lora.rank == 0 and not any(fnmatchcase(name, pattern) for pattern in frozen)


def with_input_gradient(
    model: LlamaConfig, lora: LoraConfig, frozen: Sequence[str] = ()
) -> set[str]:
    """Returns the names of the parameters, and layers.N.attention for the attention of a block,
    whose input has a gradient: those after the first that is trained or has an adapter.
    """
    order: list[tuple[str, ...]] = [("tok_embeddings.weight",)]
    for i in range(model.num_layers):
        order += [tuple(f"layers.{i}.{name}" for name in group) for group in ORDER]
    order += [("norm.weight",), ("output.weight",)]
    own = {name for name in parameter_shapes(model) if is_trained(name, model, lora, frozen)}
    adapted = {
        f"layers.{i}.{name}"
        for i in range(model.num_layers)
        for name in block_shapes(model)
        if lora.rank > 0 and lora.adapts_layer(i) and name.split(".")[-2] in lora.target_names
    }
    for number, group in enumerate(order):
        if (own | adapted).intersection(group):
            return {name for later in order[number + 1 :] for name in later}
    return set()


def flops_per_token(
    model: LlamaConfig,
    seq_len: int,
    lora: LoraConfig = NO_ADAPTERS,
    frozen: Sequence[str] = (),
) -> int:
    """Counts the FLOPs of one token, forward and backward.

    6 per parameter: 2 in the forward, 2 for the gradient of its input, 2 for its own. And 12 H Dh S
    for the attention of a block, a third of it in the forward, or 12 H Dh w with a window of w < S.
    A token uses the parameters of `experts_per_token` experts. What is frozen has no gradient of
    its own, and what stands before all that is trained has none of its input. The input embedding
    is a lookup and is not counted, unless it is tied: then it is also the output projection.
    """
    shapes = parameter_shapes(model)
    embedding = shapes.pop("tok_embeddings.weight")
    shapes["output.weight"] = embedding  # of the same shape
    gradients = with_input_gradient(model, lora, frozen)
    flops = 0
    for name, shape in shapes.items():
        times = 1 + (name in gradients) + is_trained(name, model, lora, frozen)
        size = math.prod(shape)
        if ".experts." in name:
            size = size // model.num_experts * model.experts_per_token
        flops += 2 * times * size
    for i, window in enumerate(model.windows(seq_len)):
        times = 3 if f"layers.{i}.attention" in gradients else 1
        flops += 4 * times * model.num_heads * model.head_dim * (window or seq_len)
    return flops + 6 * num_adapter_parameters(model, lora)


def peak_tflops(device_name: str) -> float | None:
    """Looks up a device's dense bf16 peak in TFLOP/s; None if it is not in the table."""
    for part, peak in PEAK_TFLOPS.items():
        if part in device_name:
            return peak
    return None
