"""A checkpoint -> a model in one process, without a process group.

What it is: what `titanlite generate` and other tools start from. The step folder is complete on its own: it holds
the model's shape, the resolved config and the tokenizer beside the weights.
What it costs: the parameters in fp32 once; their files are read twice, first to see that they are what was written.
"""

from __future__ import annotations

from pathlib import Path

import torch

from titanlite.checkpoint.manifest import Damaged, read_manifest
from titanlite.checkpoint.storage import read_step, verify_files
from titanlite.config import ConfigError
from titanlite.configure import load_config
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a step folder."""
    return Tokenizer(folder / "tokenizer.model")


def read_model_config(folder: Path) -> LlamaConfig:
    """The model's shape. Raises ConfigError where `model.json` is absent or damaged."""
    path = folder / "model.json"
    try:
        return LlamaConfig.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: {error}; the checkpoint is not whole") from None


def trained_length(folder: Path) -> int:
    """The sequence length the model was trained on."""
    return load_config([str(folder / "config.toml")]).training.seq_len


def load_model(folder: Path, device: torch.device, seq_len: int) -> Llama:
    """The model of a step folder, for sequences of up to `seq_len` tokens."""
    manifest = read_manifest(folder)
    needed = [name for name in manifest.files if name.startswith("model")]
    if problems := verify_files(folder, manifest, needed):
        raise Damaged(problems)
    with torch.device("meta"):
        model = Llama(read_model_config(folder), seq_len)
    model.to_empty(device=device)
    model.reset_rope(device)
    read_step(folder, {"model": model.state_dict()}, alone=True)
    return model.eval()
