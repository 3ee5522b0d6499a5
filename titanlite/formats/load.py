"""Weights out of a checkpoint: into a new run, or into a model in one process.

What it is: what `checkpoint.initial_load`, `titanlite generate` and other tools start from: a checkpoint of any format
that `formats/recognise.py` knows. A step folder of ours is read through its manifest and hashes.
What it costs: the parameters in fp32 once; files of ours are read twice, first to see that they are what was written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.manifest import CorruptCheckpoint, read_manifest
from titanlite.checkpoint.state import ModelState
from titanlite.checkpoint.storage import (
    find_step_folder,
    list_steps,
    read_step,
    step_folder,
    verify_files,
    verify_together,
)
from titanlite.config.schema import CheckpointConfig, ConfigError
from titanlite.data.tokenizer import Tokenizer
from titanlite.distributed.agreement import broadcast_from_rank0
from titanlite.formats.fill import agree_on, differences, fill
from titanlite.formats.full_state import FullState
from titanlite.formats.recognise import is_ours, open_full_state
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama

logger = logging.getLogger("titanlite")


def open_verified(path: Path, step: int | None = None, model: str = "", trust_pickle: bool = False) -> FullState:
    """A checkpoint of any format whose weights are what was written, as far as the format has hashes.

    Raises ConfigError; CorruptCheckpoint where it is not whole, with the run's other steps.
    """
    full = open_full_state(path, step, model, trust_pickle)
    if full.about.format == "titanlite":
        manifest = read_manifest(full.path)
        if problems := verify_files(full.path, manifest, [name for name in manifest.files if name.startswith("model")]):
            raise CorruptCheckpoint([*problems, _others(full.path)])
    return full


def tokenizer_of(full: FullState, path: str = "") -> Tokenizer:
    """The checkpoint's tokenizer, or the rank file at `path`. Raises ConfigError where there is neither."""
    if path:
        return Tokenizer(path)
    if full.about.tokenizer is None:
        raise ConfigError(f"{full.path}: has no tokenizer that titanlite reads; name a rank file with --tokenizer")
    return Tokenizer(full.path / "tokenizer.model", full.about.tokenizer)


def load_weights(
    config: CheckpointConfig, model: ModelState, llama: LlamaConfig, tokenizer: Tokenizer, group: Any
) -> None:
    """Replaces a new run's weights with those that `checkpoint.initial_load` names; all processes call it together.

    Raises ConfigError where that is damaged, not finite or not of the model's shape.
    """
    weights = model.state_dict()
    path, content = Path(config.initial_load), tokenizer.path.read_bytes()
    origin = read_weights(path, weights, llama, content, config.trust_pickle, group)
    logger.info("loading weights from %s", origin)
    model.load_state_dict(weights)


def read_weights(
    path: Path,
    state: dict[str, Any],
    model: LlamaConfig,
    tokenizer: bytes,
    trust_pickle: bool = False,
    group: Any = None,
) -> Path:
    """Fills `state` (parameter name -> tensor or DTensor) from a checkpoint of any format; a run's newest.

    All processes of `group` call it together, in any layout, and each reads what it holds; returns the path. Raises
    ConfigError where that is damaged, not finite or not of `model`'s shape.
    """
    if not broadcast_from_rank0(lambda: is_ours(path)):
        full = agree_on(lambda: open_full_state(path, trust_pickle=trust_pickle))
        _compare_tokenizers(full, tokenizer)
        agree_on(lambda: _fill(full, state, model))
        return path
    # Rank 0 chooses for all: the run it belongs to may be saving another one now.
    folder = Path(broadcast_from_rank0(lambda: str(find_step_folder(path))))
    if problems := verify_together(folder, "model", group):
        raise CorruptCheckpoint([*problems, _others(folder)])
    if not read_manifest(folder).finite:
        raise ConfigError(f"{folder}: holds NaN or infinity; choose another step")
    _compare_tokenizers(open_full_state(folder), tokenizer)
    read_step(folder, {"model": state}, group=group)
    return folder


def _compare_tokenizers(full: FullState, tokenizer: bytes) -> None:
    if full.about.tokenizer not in (None, tokenizer):
        logger.warning("%s: was trained with another tokenizer, so its embeddings are of other tokens", full.path)


def _fill(full: FullState, state: dict[str, Any], model: LlamaConfig) -> None:
    if (there := full.about.model) is not None:
        heads = [(name, getattr(there, name), getattr(model, name)) for name in ("num_heads", "num_kv_heads")]
        if wrong := [f"model.{name} = {own}, and {its} in {full.path}" for name, its, own in heads if its != own]:
            raise ConfigError(wrong)
        for name in ("rope_theta", "rope_scaling", "norm_eps"):
            if (its := getattr(there, name)) != (own := getattr(model, name)):
                logger.warning("%s: was trained with %s = %s; this model has %s", full.path, name, its, own)
    fill(full, state)


def _others(folder: Path) -> str:
    """What to name instead of a damaged checkpoint."""
    others = [str(step) for step in list_steps(folder.parent) if step_folder(folder.parent, step) != folder]
    return f"{folder} is damaged; other steps in {folder.parent}: {', '.join(others) or 'none'}"


def load_model(full: FullState, device: torch.device, seq_len: int) -> Llama:
    """The model of a checkpoint, for sequences of up to `seq_len` tokens. Raises CorruptCheckpoint or ConfigError."""
    config = full.model
    if f"layers.{config.num_layers - 1}.attention.wq.weight" not in full.tensors:  # before a million are made
        raise CorruptCheckpoint(
            f"{full.path}: holds no {config.num_layers} layers, as the description of its model says"
        )
    with torch.device("meta"):
        model = Llama(config, seq_len)
    if problems := differences(full, model.state_dict()):  # before there is memory for what it says it is
        raise CorruptCheckpoint(problems)
    model.to_empty(device=device)
    model.reset_rope(device)
    fill(full, model.state_dict())
    return model.eval()
