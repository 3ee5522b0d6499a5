"""Reads files and folders that hold tensors by name: torch.save, stock DCP and safetensors.

What it is: such a file knows nothing of models. Its names become those of titanlite's parameters,
whatever wrapper or trainer saved them; training state is set apart; names of other software are
refused. The model's shape, the tokenizer, step and trained length come from small files or entries
beside the tensors, if there are any.
What it costs: small files are read, and no tensor.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from titanlite.runtime.documents import parse_json
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import read_bounded
from titanlite.tokenizer.tokenizer_json import MAX_JSON_FILE
from titanlite.tools.formats import torchtitan_names
from titanlite.tools.formats.full_state import ORIGIN, About, FullState, FullTensor
from titanlite.tools.formats.huggingface_tokenizer import companions_in, tokenizer_in
from titanlite.tools.formats.safetensors_files import read_whole_file
from titanlite.tools.formats.same_model import without_tables
from titanlite.tools.formats.shape_file import sequence_length
from titanlite.tools.formats.step_folder import model_of
from titanlite.tools.formats.torch_file import Tree, read_tree

TORCH_KEYS = ("model", "state_dict", "model_state_dict")  # of a state dict within a dict
ROOTS = ("tok_embeddings.", "layers.", "norm.", "output.")  # of the model's parameter names
# Parts of names of other software that no name of ours has
FOREIGN = (
    "base_model.model.",
    "embed_tokens.",
    "gpt_neox.",
    "lm_head.",
    "transformer.h.",
    "transformer.wte.",
    ".attn.",
    ".mlp.",
    ".moe.",
    ".norm_1.",
    ".sa_norm.",
    ".self_attention.linear_",
    ".self_attn.",
)
# What a run saves besides parameters
TRAINING = (
    "optimizer.",
    "schedule.",
    "data.",
    "progress.",
    "random.",
    "loss_scale.",
    "stability-",
    "ema.",
    "noise_scale.",
    "frozen.",
)


def open_torch_file(path: Path) -> FullState:
    """The checkpoint in a file of torch.save: a state dict, or a dict that has one under a usual
    key.
    """
    tree, records = read_tree(path)
    about = About("torch")
    shape = tree.get("model_config")
    if isinstance(shape, dict):
        about.model = model_of(path, json.dumps(shape, default=str).encode(), "'model_config'")
    origin = {"step": tree.get("step"), "seq_len": tree.get("seq_len")}
    _add_origin(about, json.dumps(origin, default=str))
    about.tokenizer = _tokenizer_in(path, tree)
    weights = tree
    for key in TORCH_KEYS:
        if isinstance(tree.get(key), dict):
            weights = tree[key]
    state = by_our_names(path, _tensors_of(weights), about)
    if not state.tensors:
        keys = ", ".join(map(repr, list(tree)[:8])) or "none"
        raise ConfigError(
            f"{path}: no tensors at the top level or under model, state_dict or "
            f"model_state_dict; its keys: {keys}"
        )
    training = tree.get("training")
    if isinstance(training, dict):
        state.others |= _tensors_of(training)
    state.records = records
    return state


def _tensors_of(tree: Tree) -> dict[str, FullTensor]:
    return {name: value for name, value in tree.items() if isinstance(value, FullTensor)}


def _tokenizer_in(path: Path, tree: Tree) -> bytes | None:
    """`Tokenizer.content`, which `convert` saves as a tensor of bytes."""
    tensor = tree.get("tokenizer")
    if not isinstance(tensor, FullTensor):
        return None
    if tensor.dtype != torch.uint8 or len(tensor.shape) != 1:
        return None
    if tensor.nbytes > MAX_JSON_FILE:
        raise ConfigError(
            f"{path}: its tokenizer has {tensor.nbytes} bytes; at most {MAX_JSON_FILE} are read"
        )
    return tensor.read().numpy().tobytes()


def open_safetensors_file(path: Path) -> FullState:
    """The checkpoint in one safetensors file, whose metadata may describe it."""
    tensors, metadata = read_whole_file(path)
    shape = metadata["model"].encode() if "model" in metadata else None
    about = About("safetensors", model_of(path, shape, "metadata entry 'model'"))
    _add_origin(about, metadata.get("titanlite", "{}"))
    return by_our_names(path, tensors, about)


def open_folder(folder: Path, form: str, stored: dict[str, FullTensor]) -> FullState:
    """The checkpoint in a folder that holds the tensors `stored`; small files may describe it."""
    about = About(form, tokenizer=tokenizer_in(folder), files=companions_in(folder))
    shape_file = folder / "model.json"
    if shape_file.is_file():
        about.model = model_of(shape_file, read_bounded(shape_file))
    origin_file = folder / ORIGIN
    if origin_file.is_file():
        _add_origin(about, read_bounded(origin_file).decode("utf-8", "replace"))
    return by_our_names(folder, stored, about)


def _add_origin(about: About, text: str) -> None:
    """Adds step and sequence length from a JSON object, if they are valid."""
    with contextlib.suppress(ValueError):
        origin = parse_json(text)
        if not isinstance(origin, dict):
            return
        step = origin.get("step")
        if type(step) is int and step >= 0:
            about.step = step
        length = sequence_length(origin.get("seq_len"))
        if length:
            about.seq_len = length


def by_our_names(path: Path, stored: dict[str, FullTensor], about: About) -> FullState:
    """Separates parameters from training state; removes tables of RoPE and prefixes of wrappers.

    Raises ConfigError if two names become one, or names are those of other software.
    """
    plain = {
        name.replace("_orig_mod.", "").removeprefix("module."): tensor
        for name, tensor in stored.items()
    }
    if len(plain) < len(stored):
        raise ConfigError(
            f"{path}: has the same parameters twice, with and without the prefix of a wrapper"
        )
    plain = without_tables(plain)
    if torchtitan_names.is_newer(plain):
        plain = torchtitan_names.from_newer(path, plain)
    elif about.model is None:
        torchtitan_names.warn_of_order(path, plain)
    _require_ours(path, plain)
    root = ""
    training = set[str]()
    is_dcp = about.format == "dcp"
    if "tok_embeddings.weight" in plain:
        # In DCP, trainers save arbitrary entries beside a model; elsewhere only titanlite's own are
        # not parameters.
        training = {name for name in plain if name.startswith(TRAINING)}
        if is_dcp:
            training |= {name for name in plain if not name.startswith(ROOTS)}
    elif "model.tok_embeddings.weight" in plain or (
        is_dcp and any(name.startswith("model.") for name in plain)
    ):
        root = "model."
        training = {name for name in plain if not name.startswith(root)}
    model: dict[str, FullTensor] = {}
    others: dict[str, FullTensor] = {}
    for name, tensor in plain.items():
        if name in training:
            others[name] = tensor
        else:
            model[name.removeprefix(root)] = tensor
    return FullState(path, about, model, others)


def _require_ours(path: Path, plain: dict[str, FullTensor]) -> None:
    """Raises ConfigError for names of other software, and where nothing is a parameter."""
    foreign = [name for name in plain if any(mark in name for mark in FOREIGN)]
    if foreign:
        raise ConfigError(
            f"{path}: has a tensor named {foreign[0]!r}; expected names as "
            "layers.0.attention.wq.weight, a folder of Hugging Face's (config.json, safetensors "
            "files), or PEFT's folder with --adapter"
        )
    if plain and all(name.startswith(TRAINING) for name in plain):
        raise ConfigError(
            f"{path}: holds only training state; name the folder that also has the model's files"
        )
