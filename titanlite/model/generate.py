"""Sampling text from a Llama, a token at a time.

What it is: a key/value cache and the loop that feeds each new token back. The first forward covers
the prompt; each later forward adds one position.
What it costs: a forward over the prompt, then 2 FLOPs per parameter and new token. The cache holds
2 L K Dh numbers per position; without it, every new token would need a forward over the whole text.
The first forward computes logits for all positions of the prompt, 4 S V bytes in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import Tensor

from titanlite.model.llama import LayerCache, Llama


class KVCache:
    """Keys and values of one layer for up to `length` positions: two tensors (B, K, length, Dh).

    With a window, a new query attends to the last `window` positions only.
    """

    def __init__(self, length: int, window: int = 0) -> None:
        self.length = length
        self.window = window
        self.filled = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new positions (B, K, S, Dh); returns keys and values for the new queries.

        Returned are all positions so far, or those of the window. The first call fixes the cache's
        dtype and device.
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
        first = 0
        if count == 1 and self.window > 0:
            first = max(0, end - self.window)
        return self.keys[:, :, first:end], self.values[:, :, first:end]


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Samples a token id from logits (V,). temperature 0: the most likely; top_k 0: no limit."""
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    scaled = (logits - logits.max()) / temperature  # at most 0, so that exp does not overflow
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


@torch.no_grad()
def generate(
    model: Llama,
    prompt: list[int],
    max_new_tokens: int,
    *,
    stop: Set[int],
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yields new token ids until one of `stop` (not yielded) or `max_new_tokens`.

    The prompt has at least one id, and prompt + new tokens fit the model's `seq_len`.
    """
    length = len(prompt) + max_new_tokens
    if not prompt or length > model.seq_len:
        raise ValueError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new ones: "
            f"expected 1 to {model.seq_len} in all"
        )
    generator = torch.Generator().manual_seed(seed)
    caches: list[LayerCache] = [KVCache(length, window) for window in model.windows]
    start = 0
    new = prompt
    for _ in range(max_new_tokens):
        tokens = torch.tensor([new], device=model.rope.device)  # (1, S)
        logits = model(tokens, caches, start)[0, -1]  # (V,)
        start += len(new)
        token = sample_token(logits, temperature, top_k, generator)
        if token in stop:
            return
        yield token
        new = [token]
