"""Sampling text from a Llama: a batch of prompts, or one, a token at a time.

What it is: a key/value cache and the loop that feeds each new token back. A batch may have prompts
of any lengths. The first forward covers as many tokens as the shortest prompt has; each later
forward adds one position to all rows. A row's next token comes from its prompt until the prompt
ends, and is sampled after that. A row that has ended leaves the batch.
Why without padding: all rows are at the same position, so attention needs no mask, the model has
no special case, and a row computes the same as alone, up to rounding (matrix sizes differ). Padded
prompts would need a mask over the cache in every later forward.
What it costs: for one prompt a forward over it, then 2 FLOPs per parameter and new token. In a
batch a forward reads the weights once for all rows, which takes most of its time. The part of a
prompt beyond the shortest one's length is computed a token at a time, so callers put prompts of
similar lengths together. The cache holds 2 L K Dh numbers per position and row, and is copied when
a row ends; without it, every new token would need a forward over the whole text. The first forward
computes logits for all its positions, 4 B S V bytes in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

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

    def keep(self, rows: list[int]) -> None:
        """Keeps these rows of the batch, in this order, and drops the others."""
        self.keys = self.keys[rows]
        self.values = self.values[rows]


class Row(NamedTuple):
    """A text to continue: at least one id, how many new ones at most, and the seed of its random
    numbers.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int


def row_seed(seed: int, number: int) -> int:
    """Derives a prompt's seed from its number (from 0), so that batches do not matter."""
    return (seed + number) % (1 << 63)


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
    rows = [Row(prompt, max_new_tokens, seed)]
    for _, token in generate_rows(model, rows, stop=stop, temperature=temperature, top_k=top_k):
        yield token


@torch.no_grad()
def generate_rows(
    model: Llama, rows: Sequence[Row], *, stop: Set[int], temperature: float, top_k: int
) -> Iterator[tuple[int, int]]:
    """Yields (index of a row, its next token id) for the rows of a batch.

    Each row ends before a token of `stop`, or after its `max_new_tokens`; its prompt and new tokens
    fit the model's `seq_len`.
    """
    for row in rows:
        if not row.prompt or len(row.prompt) + row.max_new_tokens > model.seq_len:
            raise ValueError(
                f"{len(row.prompt)} prompt tokens + {row.max_new_tokens} new ones: "
                f"expected 1 to {model.seq_len} in all"
            )
    texts = [list(row.prompt) for row in rows]
    lengths = [len(row.prompt) + row.max_new_tokens for row in rows]  # final length of each row
    generators = [torch.Generator().manual_seed(row.seed) for row in rows]
    places = [i for i, row in enumerate(rows) if row.max_new_tokens > 0]  # rows still in the batch
    if not places:
        return
    device = model.rope.device
    caches = [KVCache(max(lengths), window) for window in model.windows]
    layer_caches: list[LayerCache] = [*caches]
    start = 0
    end = min(len(texts[i]) for i in places)
    while places:
        tokens = torch.tensor([texts[i][start:end] for i in places], device=device)  # (B, S)
        logits = model(tokens, layer_caches, start)[:, -1].float().cpu()  # (B, V)
        running = []
        for place, i in enumerate(places):
            if len(texts[i]) == end:  # the prompt is used up: sample the next token
                token = sample_token(logits[place], temperature, top_k, generators[i])
                if token in stop:
                    continue
                texts[i].append(token)
                yield i, token
                if len(texts[i]) == lengths[i]:
                    continue
            running.append(place)
        if 0 < len(running) < len(places):
            for cache in caches:
                cache.keep(running)
        places = [places[place] for place in running]
        start = end
        end += 1
