"""Takes model and tokenizer from a run's initial weights: `model.flavor = "from_checkpoint"`.

What it is: the description in `checkpoint.initial_load` becomes keys of the config, which the run
records in its config.toml. A key that the user sets stays as it is; if it contradicts the weights,
loading them reports it.
What it costs: headers and small files are read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from titanlite.config.schema import Config
from titanlite.model.flavors import LlamaConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer_json import TOKENIZER_FILES
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.fingerprint import fingerprint
from titanlite.tools.formats.same_model import numbers_without_key, require_own_tensors


def adopt_checkpoint(config: Config) -> Config:
    """The config with the keys of the checkpoint's model, and its tokenizer if none is named.

    Raises ConfigError if there is no checkpoint, or its model has what no key says.
    """
    sizes = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
    if config.data.tokenizer and all(getattr(config.model, name) for name in sizes):
        return config  # the config.toml of a run, which has adopted it
    if not config.checkpoint.initial_load:
        raise ConfigError(
            "model.flavor = from_checkpoint: expected the path of a checkpoint in "
            "checkpoint.initial_load"
        )
    full = open_full_state(Path(config.checkpoint.initial_load))
    require_own_tensors(full)
    model = config.model
    for name, value in keys_of(full.model, full.path).items():
        if getattr(model, name) is None:  # not set by the user
            model = dataclasses.replace(model, **{name: value})
    data = config.data
    has_tokenizer = full.path.is_dir() and any(
        (full.path / name).is_file() for name in TOKENIZER_FILES
    )
    if not data.tokenizer and has_tokenizer:
        data = dataclasses.replace(data, tokenizer=str(full.path))
    if not data.tokenizer:
        raise ConfigError(
            f"model.flavor = from_checkpoint: {full.path} has no tokenizer beside its weights; set "
            "data.tokenizer, or convert it to a folder: titanlite convert ... --to hf"
        )
    return dataclasses.replace(config, model=model, data=data)


def fingerprint_of(path: Path) -> str:
    """The fingerprint of the weights at a path. Raises ConfigError or CorruptCheckpoint."""
    return fingerprint(open_full_state(path))


def keys_of(model: LlamaConfig, path: Path) -> dict[str, Any]:
    """The keys of [model] that give this model. Raises ConfigError if there are none."""
    keys: dict[str, Any] = {
        "dim": model.dim,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "ffn_dim": model.ffn_dim,
        "rope_theta": model.rope_theta,
        "norm_eps": model.norm_eps,
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "sliding_window": model.sliding_window,
        "window_layers": model.window_layers,
        "embeddings": "tied" if model.tied_embeddings else "untied",
        "vocab_size": model.vocab_size,
        "rope_scaling": "none",
    }
    if model.num_experts:
        keys["num_experts"] = model.num_experts
        keys["experts_per_token"] = model.experts_per_token
        keys["expert_ffn_dim"] = model.expert_ffn_dim
    scaling = model.rope_scaling
    if scaling is None:
        return keys
    keys["rope_scaling"] = scaling.kind
    keys["rope_factor"] = scaling.factor
    if scaling.kind != "linear":
        keys["rope_original_context"] = scaling.original_context
    missing = numbers_without_key(scaling)
    if missing:
        raise ConfigError(
            [
                f"{path}: {name} = {value:g}, for which there is no key"
                for name, value in missing.items()
            ]
        )
    return keys
