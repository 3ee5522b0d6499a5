"""Sampling text from a Llama, one token at a time.

What it is: a key/value cache and the loop that feeds each new token back.
What it costs: one forward over the prompt, then 2 FLOPs per parameter and new token. The cache
holds 2 L K Dh numbers per position; without it, every new token would need a forward over the whole
text.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from titanlite.model.llama import LayerCache, Llama


class KVCache:
    """Keys and values of one layer for up to `length` positions: two tensors (B, K, length, Dh)."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.filled = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new positions (B, K, S, Dh) and returns all so far.

        They are in the dtype and on the device of the first.
        """
        batch, heads, count, width = k.shape
        if self.filled == 0:
            self.keys = k.new_empty(batch, heads, self.length, width)
            self.values = v.new_empty(batch, heads, self.length, width)
        elif count > 1:
            raise ValueError(
                "expected one position per call after the first: attention has no mask for more"
            )
        end = self.filled + count
        self.keys[:, :, self.filled : end] = k
        self.values[:, :, self.filled : end] = v
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from logits (V,). temperature 0: the most likely; top_k 0: no limit."""
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    scaled = (logits - logits.max()) / temperature  # at most 0, so that nothing overflows
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


@torch.no_grad()
def generate(
    model: Llama,
    prompt: list[int],
    max_new_tokens: int,
    *,
    stop: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yields new token ids until `stop` (not yielded) or `max_new_tokens`.

    The prompt has at least one id, and prompt + new tokens fit the model's `seq_len`.
    """
    total = len(prompt) + max_new_tokens
    if not prompt or total > model.seq_len:
        raise ValueError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new ones: "
            f"expected 1 to {model.seq_len} in all"
        )
    device = model.rope.device
    generator = torch.Generator().manual_seed(seed)
    caches: list[LayerCache] = [KVCache(total) for _ in model.layers]
    new = prompt
    start = 0
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([new], device=device), caches, start)
        start += len(new)
        token = sample_token(logits[0, -1], temperature, top_k, generator)
        if token == stop:
            return
        yield token
        new = [token]
