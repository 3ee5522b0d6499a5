"""Reads a model's shape from a file.

What it is: the values in a file may be of any type and size, so each is checked before memory is
allocated.
Why it is not in `flavors.py`: training takes the shape from its config.
"""

from __future__ import annotations

from dataclasses import replace

from titanlite.model.flavors import (
    SCALINGS,
    LlamaConfig,
    expert_problems,
    with_one_window,
    without_unused_experts,
)
from titanlite.runtime.documents import parse_json
from titanlite.runtime.typed_json import typed

MOST_POSITIONS = 1 << 24  # per sequence; a longer RoPE table takes gigabytes


LARGEST = 1 << 24  # the largest allowed size of a dimension


def from_json(text: str) -> LlamaConfig:
    """Reads what `LlamaConfig.to_json` wrote.

    Raises ValueError for anything else.
    """
    return checked(typed(LlamaConfig, parse_json(text)))


def sequence_length(value: object) -> int:
    """Reads a sequence length from a file's value; 0 if there is none or no model can have it."""
    if type(value) is int and 0 < value <= MOST_POSITIONS:
        return value
    return 0


def checked(config: LlamaConfig) -> LlamaConfig:
    """Checks a config and converts its real numbers to floats.

    Raises ValueError for values that no model can have.
    """
    for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"):
        limit = 1 << 14 if name == "num_layers" else LARGEST
        _require_integer(name, getattr(config, name), limit)
    _require_real("rope_theta", config.rope_theta, 1e12)
    if config.rope_theta < 2:  # as the key has it; YaRN divides by the logarithm
        raise ValueError(f"rope_theta = {config.rope_theta!r:.40}: expected at least 2")
    _require_real("norm_eps", config.norm_eps, 1)
    scaling = config.rope_scaling
    if scaling:
        if scaling.kind not in SCALINGS:
            raise ValueError(
                f"rope_scaling of kind {scaling.kind!r:.40}; allowed: {', '.join(SCALINGS)}"
            )
        _require_integer("original_context", scaling.original_context, 1 << 31)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _require_real(name, getattr(scaling, name), 1e12)
        if scaling.attention_factor != 0:
            _require_real("attention_factor", scaling.attention_factor, 1e12)
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {scaling.low_freq_factor}: expected one below high_freq_factor"
            )
    heads = config.num_heads
    if type(config.explicit_head_dim) is not int or config.explicit_head_dim != 0:
        _require_integer("head_dim", config.explicit_head_dim, LARGEST)
    elif config.dim % heads:
        raise ValueError(f"a width of {config.dim} over {heads} heads: expected a multiple")
    if config.head_dim % 2:
        raise ValueError(f"heads of width {config.head_dim}: expected an even width")
    if heads % config.num_kv_heads:
        raise ValueError(
            f"{config.num_kv_heads} heads of keys and values for {heads} of queries: expected a "
            "divisor"
        )
    if config.explicit_head_dim * heads == config.dim:
        config = replace(config, explicit_head_dim=0)  # so that two configs of one model are equal
    if type(config.sliding_window) is not int or config.sliding_window != 0:
        _require_integer("sliding_window", config.sliding_window, 1 << 31)
    if type(config.window_layers) is not str:
        raise ValueError(f"window_layers = {config.window_layers!r:.40}: expected a text")
    config = with_one_window(config)
    for name in ("num_experts", "experts_per_token", "expert_ffn_dim"):
        if type(getattr(config, name)) is not int or getattr(config, name) != 0:
            _require_integer(name, getattr(config, name), LARGEST)
    config = without_unused_experts(config)
    problems = expert_problems(config)
    if problems:
        raise ValueError(problems[0])
    for name in ("qkv_bias", "qk_norm"):
        if type(getattr(config, name)) is not bool:
            raise ValueError(f"{name} = {getattr(config, name)!r:.40}: expected true or false")
    return replace(
        config, rope_theta=float(config.rope_theta), tied_embeddings=bool(config.tied_embeddings)
    )


def _require_integer(name: str, value: object, limit: int) -> None:
    if type(value) is not int or not 0 < value < limit:
        raise ValueError(f"{name} = {value!r:.40}: expected an integer above 0 and below {limit}")


def _require_real(name: str, value: float, limit: float) -> None:
    if type(value) not in (int, float) or not 0 < value < limit:
        raise ValueError(f"{name} = {value!r:.40}: expected a number above 0 and below {limit:g}")
