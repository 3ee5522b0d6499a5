"""A checkpoint -> a model in one process, without a process group.

What it is: what `titanlite generate` and other tools start from. The step folder is complete on its own: it holds
the resolved config and the tokenizer beside the weights.
What it costs: the parameters in fp32 once; each is read straight into its place.
"""

from __future__ import annotations

from pathlib import Path

import torch

from titanlite.checkpoint.storage import read_step
from titanlite.configure import load_config
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.flavors import resolve_flavor
from titanlite.model.llama import Llama


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a step folder."""
    return Tokenizer(folder / "tokenizer.model")


def load_model(folder: Path, device: torch.device, seq_len: int = 0) -> Llama:
    """The model of a step folder, for sequences of up to `seq_len` tokens (0: as trained)."""
    config = load_config([str(folder / "config.toml")])
    llama = resolve_flavor(config.model, read_tokenizer(folder).size)
    with torch.device("meta"):
        model = Llama(llama, seq_len or config.training.seq_len)
    model.to_empty(device=device)
    model.reset_rope()
    read_step(folder, {"model": model.state_dict()})
    return model.eval()
