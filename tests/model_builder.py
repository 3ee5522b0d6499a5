"""A small Llama with weights, for tests."""

import torch

from titanlite.model.flavors import LlamaConfig
from titanlite.model.llama import Llama

SMALL = LlamaConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=101)


def small_model(seq_len: int = 16, seed: int = 0, config: LlamaConfig = SMALL) -> Llama:
    """Built as train.py does: on meta, given memory, initialised. What init leaves out is NaN."""
    with torch.device("meta"):
        model = Llama(config, seq_len)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, float("nan"))
    model.init_weights(seed)
    return model
