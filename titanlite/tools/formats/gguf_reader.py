"""Reading a GGUF file, quantized or not: names, metadata, dequantization.

What it is: the package `gguf` (`pip install titanlite[gguf]`) reads the header and dequantizes;
here its metadata becomes a `LlamaConfig`, and its tensors get titanlite's names. Quantized
matrices are read as fp32, row by row: these are the numbers with which llama.cpp computes, not
those of the model before it was quantized. The tokenizer in the file is not read.
Order of rows: that of titanlite in the architecture `llama`, Hugging Face's in `qwen2` and `qwen3`.
What it costs: the header is read; rows are dequantized when they are used.
Reference: github.com/ggml-org/ggml, docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, RopeScaling
from titanlite.model.shape_file import checked, sequence_length
from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.full_state import About, FullState, FullTensor, Part
from titanlite.tools.formats.gguf_file import (
    DTYPES,
    FREQUENCIES,
    QuantizedTensor,
    frequency_factors,
    names,
    package,
)

logger = logging.getLogger("titanlite")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# RoPE rotates what these compute
PERMUTED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
LLAMA3_FACTORS = (8.0, 32.0)  # of the released models


def open_file(path: Path) -> FullState:
    """The checkpoint in a GGUF file. Raises CorruptCheckpoint or ConfigError."""
    gguf = package()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: _tensor(path, tensor) for tensor in reader.tensors}
        factors: np.ndarray[Any, Any] | None = None
        if FREQUENCIES in tensors:
            factors = tensors.pop(FREQUENCIES).read().numpy()
        config = _config(path, fields, tensors, factors)
    except ConfigError:
        raise
    except Exception as error:  # whatever the package raises, the file is the cause
        raise CorruptCheckpoint(
            f"{path}: not a GGUF file that can be read ({type(error).__name__}: {str(error)[:200]})"
        ) from None
    logger.warning(
        "%s: its tokenizer is not read; name one with --tokenizer where text is needed", path
    )
    architecture = fields["general.architecture"]
    found: dict[str, FullTensor] = {}
    for name, gguf_name in names(config).items():
        tensor = tensors.pop(gguf_name, None)
        if tensor is None:
            continue
        is_permuted = name.rpartition(".")[0].endswith(PERMUTED)
        if architecture != "llama" and is_permuted:
            tensor = dataclasses.replace(tensor, half_split=config.head_dim)
        found[name] = tensor
    length = sequence_length(fields.get(f"{architecture}.context_length", 0))
    # What is left in `tensors` is not known: comparing the models reports it
    return FullState(path, About("gguf", config, seq_len=length), found | tensors)


def _tensor(path: Path, tensor: Any) -> FullTensor:
    """A tensor of the package's reader. Its shape there begins with the innermost dimension."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    begin = int(tensor.data_offset)
    kind = tensor.tensor_type.name
    offsets = (0,) * len(shape)
    if kind in DTYPES:
        return FullTensor(DTYPES[kind], shape, (Part(path, begin, offsets, shape),))
    if len(shape) != 2:
        raise ConfigError(f"{path}: {tensor.name[:200]!r} is {kind} of shape {shape}")
    row_bytes = int(tensor.n_bytes) // shape[0]
    part = Part(path, begin, offsets, (shape[0], row_bytes))
    return QuantizedTensor(torch.float32, shape, (part,), kind=kind)


def _config(
    path: Path,
    fields: dict[str, Any],
    tensors: dict[str, FullTensor],
    factors: np.ndarray[Any, Any] | None,
) -> LlamaConfig:
    """The model that the metadata describes.

    Raises ConfigError with every field that titanlite's Llama does not support, KeyError for one
    that is missing.
    """
    family = fields["general.architecture"]
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture = {family!r:.99}; "
            f"allowed: {', '.join(map(repr, ARCHITECTURES))}"
        )

    def of_family(name: str, default: Any = None) -> Any:
        return fields.get(f"{family}.{name}", default)

    scaling = of_family("rope.scaling.type", "none")
    allowed = {
        "expert_count": (of_family("expert_count", 0), (0,)),
        "attention.sliding_window": (of_family("attention.sliding_window", 0), (0,)),
        "rope.scaling.type": (scaling, ("none", "linear")),
    }
    problems = [
        f"{path}: {family}.{name} = {value!r:.99}; allowed: {', '.join(map(repr, choices))}"
        for name, (value, choices) in allowed.items()
        if value not in choices
    ]
    if problems:
        raise ConfigError(problems)
    dim = fields[f"{family}.embedding_length"]
    heads = fields[f"{family}.attention.head_count"]
    head_dim = of_family("attention.key_length", dim // heads)
    if of_family("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"{path}: {family}.rope.dimension_count = {of_family('rope.dimension_count')}; "
            f"allowed: the width of a head, {head_dim}"
        )
    config = LlamaConfig(
        dim=dim,
        num_layers=fields[f"{family}.block_count"],
        num_heads=heads,
        num_kv_heads=of_family("attention.head_count_kv", heads),
        ffn_dim=fields[f"{family}.feed_forward_length"],
        vocab_size=tensors["token_embd.weight"].shape[0],
        tied_embeddings="output.weight" not in tensors,
        rope_theta=of_family("rope.freq_base", 10000.0),
        norm_eps=_shortest(fields[f"{family}.attention.layer_norm_rms_epsilon"]),
        explicit_head_dim=head_dim,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    if scaling == "linear":
        factor = fields[f"{family}.rope.scaling.factor"]
        config = dataclasses.replace(config, rope_scaling=RopeScaling(factor, kind="linear"))
    if factors is not None:
        config = dataclasses.replace(config, rope_scaling=_llama3_scaling(path, config, factors))
    return checked(config)


def _shortest(value: float) -> float:
    """The number with the fewest digits that has these 32 bits; 1e-5 is read as 9.9999997e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(path: Path, config: LlamaConfig, factors: np.ndarray[Any, Any]) -> RopeScaling:
    """Llama 3.1's scaling, of which the file has the divisor of each frequency."""
    for factor in LLAMA3_FACTORS:
        scaling = RopeScaling(factor)
        expected = frequency_factors(dataclasses.replace(config, rope_scaling=scaling))
        assert expected is not None
        if expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-4):
            return scaling
    raise ConfigError(
        f"{path}: {FREQUENCIES} is not Llama 3.1's scaling by "
        f"{' or '.join(f'{factor:g}' for factor in LLAMA3_FACTORS)} over 8,192 tokens"
    )
