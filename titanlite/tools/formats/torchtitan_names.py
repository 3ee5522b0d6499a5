"""Translates torchtitan's two generations of parameter names.

What it is: torchtitan 0.2 has titanlite's names for dense models; its mixtures are not read or
written. 0.3 has those of `NEWER_NAMES`, with equal shapes. The rows of a Llama are in the same
order as here. Its Qwen3, the model with norms of q and k, rotates other pairs and has the rows of
Hugging Face; in 0.2 only the order tells it from titanlite's own, so there the order is not known.
torchtitan saves the output of a tied model too, and does not load a model without it. Its mixtures
also have a bias of each expert in the choice, which titanlite's do not: it is written as zeros.
What it costs: no tensor is read but these biases.
Reference: torchtitan 0.3.0 and 0.2.2, `models/llama3` and `models/qwen3`, `state_dict_adapter.py`;
`models/common/moe.py`
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
# Parts of a parameter's name: ours -> those of torchtitan 0.3
NEWER_NAMES = {
    ".attention.wq.": ".attention.qkv_linear.wq.",
    ".attention.wk.": ".attention.qkv_linear.wk.",
    ".attention.wv.": ".attention.qkv_linear.wv.",
    ".feed_forward.router.": ".moe.router.gate.",
    ".feed_forward.experts.w1.weight": ".moe.routed_experts.inner_experts.w1_EFD",
    ".feed_forward.experts.w2.weight": ".moe.routed_experts.inner_experts.w2_EDF",
    ".feed_forward.experts.w3.weight": ".moe.routed_experts.inner_experts.w3_EFD",
    "output.weight": "lm_head.weight",
}
MODULE = ".attention.qkv_linear."
ROUTER = ".feed_forward.router.weight"
EXPERT_BIAS = ".moe.expert_bias_E"  # of a block: (E,), fp32
NORM = ".attention.q_norm.weight"
# What RoPE rotates: a parameter, also within the name of its moment or average
PARAMETER = re.compile(r"layers\.\d+\.attention\.(wq|wk|q_norm|k_norm)\.weight")


def to_torchtitan(name: str, generation: str) -> str:
    """torchtitan's name of a parameter, or of training state whose name has that of a parameter."""
    if generation == NEWER:
        for ours, theirs in NEWER_NAMES.items():
            name = name.replace(ours, theirs)
    return name


def is_newer(names: Mapping[str, object]) -> bool:
    """Whether the names are those of torchtitan 0.3."""
    return any(MODULE in name for name in names)


def from_newer(path: Path, tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    """The same tensors under our names, in our order of rows.

    Raises ConfigError if two names become one, or if a mixture has biases of its experts.
    """
    renamed: dict[str, FullTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(EXPERT_BIAS):
            _require_zeros(path, name, tensor)
            continue
        our_name = name
        for ours, theirs in NEWER_NAMES.items():
            our_name = our_name.replace(theirs, ours)
        if our_name in renamed:
            raise ConfigError(
                f"{path}: has {our_name!r} twice, under the names of torchtitan 0.2 and of 0.3"
            )
        renamed[our_name] = tensor
    widths = split_widths(renamed)
    return {
        name: dataclasses.replace(tensor, half_split=widths.get(name, 0))
        for name, tensor in renamed.items()
    }


def _require_zeros(path: Path, name: str, bias: FullTensor) -> None:
    """Raises ConfigError unless these biases of the experts change no choice."""
    if any(block.any() for block in bias.blocks()):
        raise ConfigError(
            f"{path}: {name!r} is not zero: torchtitan's router adds it before it chooses experts, "
            "and titanlite's has no such bias; expected zeros, as of a run with load_balance_coeff "
            "= None"
        )


def routers(tensors: Mapping[str, FullTensor]) -> dict[str, int]:
    """Block (`layers.3`) -> its number of experts, by our names; nothing for a dense model."""
    return {
        name.removesuffix(ROUTER): tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(ROUTER) and tensor.shape
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
