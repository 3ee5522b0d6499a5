"""A model's shape from a file: the values may be of any type and size, so each is checked before
memory is allocated.

Why it is here and not in `flavors.py`: training knows its shape from the config. Reading
checkpoints and files of other software does not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from titanlite.model.flavors import LlamaConfig, RopeScaling

MOST_POSITIONS = 1 << 24  # of a sequence; a RoPE table of more takes gigabytes


def from_json(text: str) -> LlamaConfig:
    """Reads what `LlamaConfig.to_json` wrote.

    Raises ValueError, TypeError or KeyError for anything else.
    """
    fields = json.loads(text)
    scaling = fields.pop("rope_scaling")
    return checked(LlamaConfig(**fields, rope_scaling=RopeScaling(**scaling) if scaling else None))


def sequence_length(value: Any) -> int:
    """The length of sequences that a file gives; 0, as without one, for what no model can have."""
    return value if type(value) is int and 0 < value <= MOST_POSITIONS else 0


def checked(config: LlamaConfig) -> LlamaConfig:
    """The config, with numbers as floats where they are real.

    Raises ValueError if a model cannot have its values.
    """
    names = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
    limits: dict[str, float] = {**dict.fromkeys(names, 1 << 24), "num_layers": 1 << 14}
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    scaling = config.rope_scaling
    if scaling:
        values["original_context"], limits["original_context"] = scaling.original_context, 1 << 31
    for name, value in values.items():
        if type(value) is not int or not 0 < value < limits[name]:
            raise ValueError(
                f"{name} = {value!r:.40}: expected an integer above 0 and below {limits[name]}"
            )
    reals: dict[str, Any] = {"rope_theta": config.rope_theta, "norm_eps": config.norm_eps}
    if scaling:
        reals |= {
            name: getattr(scaling, name)
            for name in ("factor", "low_freq_factor", "high_freq_factor")
        }
    for name, value in reals.items():
        if type(value) not in (int, float) or not 0 < value < (1 if name == "norm_eps" else 1e12):
            raise ValueError(
                f"{name} = {value!r:.40}: expected a number above 0 and below 1e12 (norm_eps: below 1)"
            )
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"low_freq_factor = {scaling.low_freq_factor}: expected one below high_freq_factor"
        )
    if (
        config.dim % config.num_heads
        or config.head_dim % 2
        or config.num_heads % config.num_kv_heads
    ):
        raise ValueError(
            f"{config.dim} over {config.num_heads} heads, {config.num_kv_heads} for keys and values"
        )
    return replace(
        config, rope_theta=float(config.rope_theta), tied_embeddings=bool(config.tied_embeddings)
    )
