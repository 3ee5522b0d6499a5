"""Writes GGUF, the file of llama.cpp.

What it is: metadata, the tokenizer and the tensors in one file, written by the `gguf` package (`pip
install gguf`); `gguf_reader.py` reads it. The architecture `llama` has titanlite's order of rows,
`qwen2` (biases of q, k and v) and `qwen3` (norms of q and k) have Hugging Face's. Vectors are fp32
whatever the matrices are; `q8_0` stores 32 numbers of a row as 8-bit integers and a scale. Llama
3.1's RoPE scaling is a tensor of divisors, one per frequency. Its numbers are in metadata too, for
which `rope.scaling.factor` cannot serve: llama.cpp would also scale linearly by it.
What it costs: one whole tensor in memory, because the package takes no less.
Reference: github.com/ggml-org/ggml, docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlite.model.flavors import LlamaConfig, block_shapes
from titanlite.model.llama import rope_frequencies
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.byte_level import to_text
from titanlite.tokenizer.tokenizer import PATTERN, Tokenizer
from titanlite.tokenizer.tokenizer_json import GPT2_PATTERN, QWEN_PATTERN, TEMPLATE_FILE
from titanlite.tools.formats import gguf_kept, huggingface
from titanlite.tools.formats.export import Export
from titanlite.tools.formats.full_state import FullTensor, half_split
from titanlite.tools.formats.gguf_tokenizer import NFC, NORMALIZED, name_of
from titanlite.tools.formats.huggingface_config import family_of
from titanlite.tools.formats.huggingface_tokenizer import merge_list, template_adds

logger = logging.getLogger("titanlite")
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in KINDS.items()}
BLOCK = {  # ours -> theirs
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # that are read and written
ALL_MODELS = "allowed: titanlite, dcp, safetensors, torch, hf"  # formats without such limits
BLOCK_Q8_0 = 32  # numbers with one scale
FREQUENCIES = "rope_freqs.weight"
# Numbers of Llama 3.1's scaling -> keys. The first is llama.cpp's, which uses it for yarn alone.
SCALING = {
    "original_context": "llama.rope.scaling.original_context_length",
    "factor": "titanlite.rope_scaling.factor",
    "low_freq_factor": "titanlite.rope_scaling.low_freq_factor",
    "high_freq_factor": "titanlite.rope_scaling.high_freq_factor",
}
# pattern -> llama.cpp's name for it, and whether llama.cpp keeps a word that is a token whole
PRE_TOKENIZERS = {
    PATTERN: ("llama-bpe", True),
    QWEN_PATTERN: ("qwen2", False),
    GPT2_PATTERN: ("gpt-2", False),
}


def package() -> Any:
    """The gguf package. Raises ConfigError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("a GGUF file needs the gguf package; pip install gguf") from None
    return gguf


def architecture_of(config: LlamaConfig) -> str:
    """The architecture that has this model's blocks.

    Raises ConfigError for what llama.cpp would not compute: in these architectures it reads neither
    a window nor, but for `llama`, divisors of frequencies.
    """
    if config.sliding_window:
        raise ConfigError(
            f"--to gguf: the model has a sliding window of {config.sliding_window}, which "
            f"llama.cpp does not read; {ALL_MODELS}"
        )
    if config.num_experts:
        raise ConfigError(
            f"--to gguf: the model has {config.num_experts} experts, and only dense models are "
            f"written; {ALL_MODELS}"
        )
    architecture = family_of(config)  # without a window one of ARCHITECTURES
    kind = config.rope_scaling.kind if config.rope_scaling else "none"
    allowed = ("none", "llama3") if architecture == "llama" else ("none",)
    if kind not in allowed:
        raise ConfigError(
            f"--to gguf: the model has RoPE scaling {kind}, and {architecture} is written with "
            f"{' or '.join(allowed)}; {ALL_MODELS}"
        )
    return architecture


def stored_width(name: str, architecture: str, config: LlamaConfig) -> int:
    """The width of a head if the file has a parameter's rows in Hugging Face's order, else 0."""
    if architecture != "llama" and huggingface.is_permuted(name):
        return config.head_dim
    return 0


def names(config: LlamaConfig) -> dict[str, str]:
    """Names in a GGUF file by our parameter names, in our order."""
    result = {"tok_embeddings.weight": "token_embd.weight"}
    for i in range(config.num_layers):
        for name in block_shapes(config):
            module, _, kind = name.rpartition(".")
            result[f"layers.{i}.{name}"] = f"blk.{i}.{BLOCK[module]}.{kind}"
    result["norm.weight"] = "output_norm.weight"
    if not config.tied_embeddings:
        result["output.weight"] = "output.weight"
    return result


def frequency_factors(config: LlamaConfig) -> np.ndarray | None:
    """The divisor of each rotary frequency, fp32 (Dh / 2,); None without scaling."""
    if config.rope_scaling is None:
        return None
    unscaled = dataclasses.replace(config, rope_scaling=None)
    cpu = torch.device("cpu")
    plain = rope_frequencies(unscaled, torch.float64, cpu)
    scaled = rope_frequencies(config, torch.float64, cpu)
    return (plain / scaled).float().numpy()


def kind_of(tensor: FullTensor, dtype: torch.dtype | None, q8: bool) -> str:
    """The ggml type that a tensor is written as."""
    if len(tensor.shape) < 2:
        return "F32"
    if q8:
        return "Q8_0"
    return KINDS.get(dtype or tensor.dtype, "F32")


def rounded(tensor: FullTensor, rows: Tensor, dtype: torch.dtype | None, q8: bool) -> Tensor:
    """Rounds rows to what a reader of the file gets."""
    kind = kind_of(tensor, dtype, q8)
    if kind == "Q8_0":
        return torch.from_numpy(_dequantized(_encoded(rows, kind)))
    return rows.to(DTYPES[kind])


def _encoded(rows: Tensor, kind: str) -> np.ndarray:
    """Encodes rows: (rows, bytes), or for a vector (numbers,) in fp32."""
    if kind == "Q8_0":
        gguf = package()
        with np.errstate(over="ignore"):  # `Export.examine` finds scales that overflow fp16
            return gguf.quants.quantize(rows.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    converted = rows.to(DTYPES[kind]).contiguous()
    if rows.ndim == 2:
        converted = converted.view(torch.uint8)
    return converted.numpy()


def _dequantized(data: np.ndarray) -> np.ndarray:
    gguf = package()
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q8_0)


def pre_tokenizer(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for the pattern.

    Raises ConfigError if it has none, or encodes otherwise under that name.
    """
    name, keeps_words = PRE_TOKENIZERS.get(tokenizer.pattern, ("", False))
    if tokenizer.whole_documents:
        name = name_of(tokenizer)
    if not name:
        raise ConfigError(
            f"{tokenizer.path}: --to gguf: its pattern has no name there; allowed: those of "
            "GPT-2, Llama 3, Qwen and SmolLM"
        )
    if tokenizer.unmade and keeps_words != (len(tokenizer.ranks) == len(tokenizer.tokens)):
        raise ConfigError(
            f"{tokenizer.path}: --to gguf: llama.cpp has ignore_merges = {keeps_words} for "
            f"pattern {name}, and here "
            f"{tokenizer.unmade} tokens encode otherwise then"
        )
    if tokenizer.nfc and name != NORMALIZED:
        logger.warning(
            "%s: its tokenizer normalises text (NFC), which llama.cpp does not", tokenizer.path
        )
    if not merge_list(tokenizer):
        raise ConfigError(
            f"{tokenizer.path}: --to gguf: it merges no tokens, and llama.cpp reads no tokenizer "
            "of its kind without merges"
        )
    return name


def write(path: Path, export: Export, length: int) -> None:
    """Writes the file; `length` is the trained sequence length.

    Raises ConfigError where the model does not fit the format, OSError.
    """
    gguf = package()
    config = export.state.model
    for width in (config.dim, config.q_dim, config.ffn_dim):
        if export.q8 and width % BLOCK_Q8_0:
            raise ConfigError(
                f"--dtype q8_0: rows of {width} numbers; allowed: multiples of {BLOCK_Q8_0}"
            )
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _write_metadata(writer, export, length)
        _write_tensors(writer, export, architecture)
    finally:
        writer.close()


def _write_tensors(writer: Any, export: Export, architecture: str) -> None:
    gguf = package()
    config = export.state.model
    for name, gguf_name in names(config).items():
        tensor = export.state.tensors[name]
        kind = gguf.GGMLQuantizationType[kind_of(tensor, export.dtype, export.q8)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(tensor.shape) // block * size
        writer.add_tensor_info(
            gguf_name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind
        )
    factors = frequency_factors(config)
    if factors is not None:
        writer.add_tensor_info(FREQUENCIES, factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names(config):
        tensor = export.state.tensors[name]
        kind = kind_of(tensor, export.dtype, export.q8)
        whole = np.empty(0, np.uint8)
        width = stored_width(name, architecture, config)
        for start, stop in tensor.row_ranges(width or 1):
            block = tensor.read(start, stop)
            if width:
                block = half_split(block, width)
            if kind == "Q8_0":
                # A scale is the largest of 32 numbers / 127, in fp16, and must be finite
                export.examine(name, (block / 127).half())
            else:
                export.examine(name, block.to(DTYPES[kind]))
            encoded = _encoded(block, kind)
            if start == 0:
                whole = np.empty((tensor.shape[0], *encoded.shape[1:]), encoded.dtype)
            whole[start:stop] = encoded
        writer.write_tensor_data(whole)
    if factors is not None:
        writer.write_tensor_data(factors)


def _write_metadata(writer: Any, export: Export, length: int) -> None:
    state = export.state
    gguf = package()
    config = state.model
    matrix = kind_of(state.tensors["tok_embeddings.weight"], export.dtype, export.q8)
    files = gguf.LlamaFileType
    types = {
        "F32": files.ALL_F32,
        "F16": files.MOSTLY_F16,
        "BF16": files.MOSTLY_BF16,
        "Q8_0": files.MOSTLY_Q8_0,
    }
    writer.add_file_type(types[matrix])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(length)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    if config.rope_scaling:  # llama3, of the architecture llama
        writer.add_uint32(SCALING["original_context"], config.rope_scaling.original_context)
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            writer.add_float64(SCALING[name], getattr(config.rope_scaling, name))
    if config.explicit_head_dim:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    template = state.about.files.get(TEMPLATE_FILE)
    if template:
        writer.add_chat_template(template.decode("utf-8", "replace"))
    if not state.about.tokenizer:
        writer.add_tokenizer_model("none")
        gguf_kept.write_fields(writer, state, None)
        return
    tokenizer = Tokenizer(state.path, state.about.tokenizer)
    texts = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, i in tokenizer.tokens.items():
        texts[i] = to_text(token)
        kinds[i] = gguf.TokenType.NORMAL
    for name, i in tokenizer.special.items():
        texts[i] = name
        kinds[i] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    pre = pre_tokenizer(tokenizer)
    writer.add_tokenizer_pre(pre)
    if tokenizer.nfc != (pre == NORMALIZED):
        writer.add_bool(NFC, tokenizer.nfc)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(merge_list(tokenizer))
    gguf_kept.write_fields(writer, state, tokenizer)
    adds_bos, adds_eos = template_adds(tokenizer)
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(adds_eos)
