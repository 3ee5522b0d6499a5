"""Reads config.json without the code of `huggingface_config.py`, to compare exports.

What it is: the `Description` of the second Llama, from the fields of the file by the rules of
transformers 5: which of two places it reads, what it takes where a field is absent, and how it
computes frequencies.
Why it is here: if the second Llama were given what our reader made of the file, a field that our
reader drops would be missing in both.
Reference: transformers 5, `modeling_rope_utils.py`, `LlamaConfig`, `MistralConfig`,
`MinistralConfig`, `Qwen2Config`, `Qwen3Config`, `Qwen3MoeConfig`, `MixtralConfig`
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from titanlite.runtime.documents import read_json
from titanlite.tools.formats.second_llama import Description

Fields = dict[str, Any]


def described_by_file(path: Path) -> Description:
    """The description in a config.json that `huggingface_config.py` has accepted."""
    return described_by_fields(read_json(path))


def described_by_fields(fields: Fields) -> Description:
    """The description of a model in the fields of a config.json."""
    family = fields["model_type"]
    heads = fields["num_attention_heads"]
    if "num_key_value_heads" in fields:
        kv_heads = fields["num_key_value_heads"] or heads
    else:
        others = {"llama": heads, "mistral": 8, "ministral": 8, "mixtral": 8, "qwen3_moe": 4}
        kv_heads = others.get(family, 32)
    width = fields.get("head_dim")
    if not width:
        width = 128 if family == "qwen3" else fields["hidden_size"] // heads
    rope = _rope(fields)
    return Description(
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width,
        norm_eps=fields.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        frequencies=_frequencies(rope, width, fields),
        amplitude=_amplitude(rope, fields),
        windows=_windows(family, fields),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        tied=fields.get("tie_word_embeddings", False),
        experts_per_token=_experts_per_token(family, fields),
    )


def _experts_per_token(family: str, fields: Fields) -> int:
    if family not in ("qwen3_moe", "mixtral"):
        return 0
    per_token: int = fields.get("num_experts_per_tok", 8 if family == "qwen3_moe" else 2)
    return per_token


def _context(fields: Fields) -> int:
    defaults = {"llama": 2048, "mistral": 1 << 17, "ministral": 1 << 17, "mixtral": 1 << 17}
    context: int = fields.get("max_position_embeddings", defaults.get(fields["model_type"], 32768))
    return context


def _rope(fields: Fields) -> Fields:
    """The entry that transformers uses: the older name, if it is there and not empty."""
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if "rope_type" not in rope:
        rope["rope_type"] = rope.get("type", "default")
    if "rope_theta" not in rope:
        usual = 1e6 if fields["model_type"] == "mixtral" else 1e4
        rope["rope_theta"] = fields.get("rope_theta", usual)
    # A field beside the entry comes before one in it
    rope["trained"] = fields.get(
        "original_max_position_embeddings",
        rope.get("original_max_position_embeddings", _context(fields)),
    )
    return rope


def _yarn_factor(rope: Fields, fields: Fields) -> float:
    factor = rope["factor"]
    return float(_context(fields) / rope["trained"] if factor is None else factor)


def _frequencies(rope: Fields, width: int, fields: Fields) -> tuple[float, ...]:
    """Radians per position, of each pair."""
    kind = rope["rope_type"]
    theta = float(rope["rope_theta"])
    plain = [theta ** (-2 * pair / width) for pair in range(width // 2)]
    if kind == "linear":
        return tuple(frequency / rope["factor"] for frequency in plain)
    if kind == "llama3":
        return tuple(_llama3(frequency, rope) for frequency in plain)
    if kind != "yarn":
        return tuple(plain)
    # The pair, as a real number, that makes so many turns in the context of training
    ends = []
    for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1):
        wavelength = rope["trained"] / turns
        ends.append(width / 2 * math.log(wavelength / (2 * math.pi), theta))
    first = max(math.floor(ends[0]), 0)
    last = min(math.ceil(ends[1]), width - 1)
    if last == first:
        last = first + 0.001  # type: ignore[assignment]
    factor = _yarn_factor(rope, fields)
    scaled = []
    for pair, frequency in enumerate(plain):
        interpolated = min(1.0, max(0.0, (pair - first) / (last - first)))
        scaled.append(frequency * (1 - interpolated + interpolated / factor))
    return tuple(scaled)


def _llama3(frequency: float, rope: Fields) -> float:
    turns = rope["trained"] * frequency / (2 * math.pi)
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(frequency * (kept + (1 - kept) / rope["factor"]))


def _amplitude(rope: Fields, fields: Fields) -> float:
    """The factor of rotated queries and keys."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    return 1 + 0.1 * math.log(max(1.0, _yarn_factor(rope, fields)))


def _windows(family: str, fields: Fields) -> tuple[int, ...]:
    """The window of each layer; 0 for none."""
    layers = fields["num_hidden_layers"]
    window = 0
    if family in ("mistral", "ministral", "mixtral") or fields.get("use_sliding_window", False):
        usual = None if family == "mixtral" else 4096
        window = fields.get("sliding_window", usual) or 0
    if family in ("llama", "mistral", "mixtral", "qwen3_moe"):  # which have no types of layers
        return ((0 if family == "llama" else window),) * layers
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers", 28) if family != "ministral" else 0
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
