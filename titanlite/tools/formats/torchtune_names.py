"""Translates torchtune's names of a Llama's parameters.

What it is: the same tensors as here, in the same order of rows (Meta's), under other names. Its
Qwen models rotate other pairs, so their rows are in another order: they are refused.
Reference: torchtune 0.6, `models/convert_weights.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from titanlite.runtime.errors import ConfigError

T = TypeVar("T")
PARTS = {  # theirs -> ours
    ".attn.q_proj.": ".attention.wq.",
    ".attn.k_proj.": ".attention.wk.",
    ".attn.v_proj.": ".attention.wv.",
    ".attn.output_proj.": ".attention.wo.",
    ".sa_norm.scale": ".attention_norm.weight",
    ".mlp_norm.scale": ".ffn_norm.weight",
    ".mlp.w": ".feed_forward.w",
}
QWEN = (".bias", ".q_norm.scale", ".k_norm.scale")


def is_torchtune(names: Mapping[str, object]) -> bool:
    """Whether the names are torchtune's."""
    return any(".sa_norm.scale" in name for name in names)


def from_torchtune(path: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under our names. Raises ConfigError for a model that is not a Llama."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.endswith(QWEN):
            raise ConfigError(
                f"{path}: has torchtune's names of a Qwen model ({name!r}), whose rows are in "
                "another order; have torchtune's FullModelHFCheckpointer save it for Hugging Face"
            )
        ours = name
        for theirs, part in PARTS.items():
            ours = ours.replace(theirs, part)
        if ours == "norm.scale":
            ours = "norm.weight"
        renamed[ours] = tensor
    return renamed
