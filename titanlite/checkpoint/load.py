"""Weights out of a checkpoint: into a new run, or into a model in one process.

What it is: what `checkpoint.initial_load`, `titanlite generate` and other tools start from. A step folder is complete
on its own: it holds the model's shape, the resolved config and the tokenizer beside the weights.
What it costs: the parameters in fp32 once; their files are read twice, first to see that they are what was written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.foreign import is_stock_dcp, read_stock
from titanlite.checkpoint.manifest import DTYPES, Damaged, Manifest, read_file, read_manifest
from titanlite.checkpoint.shard_file import ShardFile
from titanlite.checkpoint.storage import (
    find_step_folder,
    list_steps,
    read_step,
    require_fit,
    step_folder,
    verify_files,
    verify_together,
)
from titanlite.config import ConfigError
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.runtime import from_rank0


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a step folder. Raises Damaged or ConfigError."""
    read_file(folder, read_manifest(folder), "tokenizer.model")  # it is what was written, and no pipe
    return Tokenizer(folder / "tokenizer.model")


def read_model_config(folder: Path, manifest: Manifest) -> LlamaConfig:
    """The model's shape. Raises Damaged where `model.json` is absent, changed, or no shape of a Llama."""
    content = read_file(folder, manifest, "model.json")
    try:
        return LlamaConfig.from_json(content.decode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder / 'model.json'}: {error}") from None


def trained_length(folder: Path) -> int:
    """The sequence length the model was trained on. Raises Damaged where the manifest does not tell."""
    length = read_manifest(folder).config.get("training", {}).get("seq_len")
    if type(length) is not int or length < 1:
        raise Damaged(f"{folder}: training.seq_len = {length!r} in its manifest")
    return length


def load_weights(path: Path, state: dict[str, Any], trust_pickle: bool, group: Any = None) -> Path:
    """Fills `state` (parameter name -> tensor or DTensor) from a step folder, a run's newest, or a stock DCP folder.

    All processes of `group` call it together, in any layout; returns the folder. Raises ConfigError where that is
    damaged, not finite or another model's.
    """
    if from_rank0(lambda: is_stock_dcp(path)):
        read_stock(path, state, trust_pickle=trust_pickle)
        return path
    folder: Path = from_rank0(lambda: find_step_folder(path))  # the run it belongs to may be saving another one now
    if problems := verify_together(folder, "model", group):
        raise Damaged([*problems, _others(folder)])
    if not read_manifest(folder).finite:
        raise ConfigError(f"{folder}: holds NaN or infinity; choose another step")
    read_step(folder, {"model": state}, group=group)
    return folder


def _others(folder: Path) -> str:
    """What to name instead of a damaged checkpoint."""
    others = [str(step) for step in list_steps(folder.parent) if step_folder(folder.parent, step) != folder]
    return f"{folder} is damaged; other steps in {folder.parent}: {', '.join(others) or 'none'}"


def read_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor of a step folder, put together from its parts. Raises Damaged."""
    entry = manifest.tensors[name]
    whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for chunk in entry.chunks:
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        zeros = [0] * len(chunk.sizes)
        file = ShardFile(folder / chunk.file)
        whole[place] = file.read(entry.key(name, chunk), entry.dtype, tuple(chunk.sizes), zeros, chunk.sizes)
    return whole


def load_model(folder: Path, device: torch.device, seq_len: int) -> Llama:
    """The model of a step folder, for sequences of up to `seq_len` tokens. Raises Damaged or ConfigError."""
    manifest = read_manifest(folder)
    if problems := verify_files(folder, manifest, [name for name in manifest.files if name.startswith("model")]):
        raise Damaged([*problems, _others(folder)])
    config = read_model_config(folder, manifest)
    if f"model.layers.{config.num_layers - 1}.attention.wq.weight" not in manifest.tensors:  # before a million are made
        raise Damaged(f"{folder}: holds no {config.num_layers} layers, as model.json says")
    with torch.device("meta"):
        model = Llama(config, seq_len)
    require_fit(folder, manifest, {"model": model.state_dict()})  # before there is memory for what it says it is
    model.to_empty(device=device)
    model.reset_rope(device)
    read_step(folder, {"model": model.state_dict()}, alone=True)
    return model.eval()
