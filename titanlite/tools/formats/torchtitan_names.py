"""Translates torchtitan's two generations of parameter names.

What it is: torchtitan 0.2 has titanlite's names. From 0.3 on, wq, wk and wv are in a module
`qkv_linear`, and the output is `lm_head`. The rows of a Llama are in the same order as here. Its
Qwen3, the model with norms of q and k, rotates other pairs and has the rows of Hugging Face; in 0.2
only the order tells it from titanlite's own, so there the order is not known.
torchtitan saves the output of a tied model too, and does not load a model without it.
What it costs: nothing; no tensor is read.
Reference: torchtitan 0.3.0 and 0.2.2, `models/llama3` and `models/qwen3`, `state_dict_adapter.py`
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from titanlite.runtime.errors import ConfigError
from titanlite.tools.formats.full_state import FullTensor

logger = logging.getLogger("titanlite")
NEWER = "torchtitan-0.3"
OLDER = "torchtitan-0.2"
GENERATIONS = (NEWER, OLDER)  # values of --names
MODULE = ".attention.qkv_linear."
NORM = ".attention.q_norm.weight"
# What RoPE rotates: a parameter, also within the name of its moment or average
PARAMETER = re.compile(r"layers\.\d+\.attention\.(wq|wk|q_norm|k_norm)\.weight")


def to_torchtitan(name: str, generation: str) -> str:
    """torchtitan's name of a parameter, or of training state whose name has that of a parameter."""
    if generation == OLDER:
        return name
    name = re.sub(r"\.attention\.(w[qkv])\.", rf"{MODULE}\1.", name)
    return re.sub(r"(^|\.)output\.weight\b", r"\1lm_head.weight", name)


def is_newer(names: Mapping[str, object]) -> bool:
    """Whether the names are those of torchtitan 0.3."""
    return any(MODULE in name for name in names)


def from_newer(path: Path, tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    """The same tensors under our names, in our order of rows.

    Raises ConfigError if two names become one.
    """
    renamed: dict[str, FullTensor] = {}
    for name, tensor in tensors.items():
        ours = name.replace(MODULE, ".attention.")
        ours = re.sub(r"(^|\.)lm_head\.weight\b", r"\1output.weight", ours)
        if ours in renamed:
            raise ConfigError(
                f"{path}: has {ours!r} twice, under the names of torchtitan 0.2 and of 0.3"
            )
        renamed[ours] = tensor
    widths = split_widths(renamed)
    return {
        name: dataclasses.replace(tensor, half_split=widths.get(name, 0))
        for name, tensor in renamed.items()
    }


def split_widths(tensors: Mapping[str, FullTensor]) -> dict[str, int]:
    """The width of a head for each tensor, by our names, whose rows torchtitan has in Hugging
    Face's order: in a Qwen3 those that RoPE rotates, and training state of the same shape.
    """
    norms = [tensor.shape for name, tensor in tensors.items() if name.endswith(NORM)]
    if not norms or len(norms[0]) != 1:
        return {}
    (head_dim,) = norms[0]
    if head_dim == 0 or head_dim % 2:
        return {}
    return {
        name: head_dim
        for name, tensor in tensors.items()
        if PARAMETER.search(name) and tensor.shape and tensor.shape[0] % head_dim == 0
    }


def warn_of_order(path: Path, tensors: Mapping[str, FullTensor]) -> None:
    """Warns of norms of q and k in a file without a model's description and with titanlite's names,
    which torchtitan 0.2 has too.
    """
    if any(name.endswith(NORM) for name in tensors):
        logger.warning(
            "%s: has norms of q and k; its rows are read in titanlite's order. torchtitan 0.2 has "
            "another order under the same names: if it saved this, have it save Hugging Face's "
            "format (checkpoint.last_save_in_hf)",
            path,
        )
