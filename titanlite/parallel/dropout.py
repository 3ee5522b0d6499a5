"""Dropout whose mask is a function of token and feature: no random generator.

What it is: a number is dropped if a hash of (the token's key, the layer's salt, the feature's
index) is below p 2^32. A token's key is a hash of (seed, sample, position in the sequence), made
with the batch (`data/stream.py`).
Why it is here: a generator's numbers depend on the order in which they are drawn, and so on the
layout. Here every rank computes the mask of its own rows, tokens or features. A recomputed forward
has the mask of the first one, and a run that resumes needs no state.
What it costs: four elementwise operations on int64 for each number, and the mask, one byte for each
number, until the backward.

How it is made: two hashes of 32 bits for each token, a and c, and one for each feature, f; the hash
of a number is (a f + c) mod 2^32. For random a and c its high bits are independent for any two
features (multiply-shift hashing: section 3.3 of arXiv 1504.06804), and for any two tokens, since
each has its own a and c. Scrambling every number instead would take twelve operations. The 32-bit
values are int64: no product has more than 63 bits, so none depends on how a device overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = (1 << 32) - 1  # the mask of the lower 32 bits


def scramble(x: Tensor) -> Tensor:
    """Permutes the 32-bit numbers, as int64; each bit of the result depends on all bits of x.

    The constants were found by github.com/skeeto/hash-prospector (issue 19). They have 31 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def dropped(keys: Tensor, salt: Tensor, first: int, count: int, p: float) -> Tensor:
    """Returns which of the features `first`, `first` + 1, ... of each token are dropped.

    keys (B, S), int64, up to 2^63 - 1 -> (B, S, count), bool. `salt`: a 32-bit number, int64; each
    layer has its own, so that masks differ. Each number is dropped with the probability p.
    """
    a = scramble(scramble(keys & LOW) ^ salt)  # (B, S)
    c = scramble(a ^ (keys >> 32))  # (B, S)
    f = scramble(torch.arange(first, first + count, device=keys.device))  # (count,)
    hashed = ((a >> 1)[..., None] * f + c[..., None]) & LOW  # (B, S, count)
    return hashed < round(p * (1 << 32))
