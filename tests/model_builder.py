"""A small Llama with weights, for tests: whole, or the parts of it that a process of some layout holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config, Parallel, Training
from titanlite.distributed.mesh import Mesh
from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama
from titanlite.parallel.fsdp import assign_shard
from titanlite.parallel.layout import AXES
from titanlite.parallel.parallelize import split
from titanlite.parallel.stages import Stages

SMALL = LlamaConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=101)
EVEN = LlamaConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=104)  # fits tp and pp


def small_model(seq_len: int = 16, seed: int = 0, config: LlamaConfig = SMALL) -> Llama:
    """Built as train.py does: on meta, given memory, initialised. What init leaves out is NaN."""
    with torch.device("meta"):
        model = Llama(config, seq_len)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, float("nan"))
    model.init_weights(seed)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, whatever part of it this process has."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_stages(
    parallel: dict[str, Any], seed: int = 0, llama: LlamaConfig = SMALL, *sections: Any, **training: Any
) -> Stages:
    """This process's parts of the model in a layout: `parallel` is the section, `training` others of its keys.

    `sections`: others, as objects.
    """
    config = Config(
        training=Training(**{"seq_len": 16, "local_batch_size": 2, **training}),
        parallel=Parallel(**parallel),
        **{type(section).__name__.lower(): section for section in sections},
    )
    mesh = Mesh("cpu", {axis: parallel.get(axis, 1) for axis in AXES}, 77)
    with torch.device("meta"):
        model = Llama(llama, config.training.seq_len)
    parts = split(model, config, mesh)
    for part in parts:
        part.to_empty(device="cpu")
        part.init_weights(seed, assign_shard)
    return Stages(parts, config, mesh, torch.device("cpu"))


# Of up to four processes, each axis among them
EIGHT_LAYOUTS = [
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 1},
]
